// One rank of a job in which rank 1 goes away: failing_rank kill|stop|exit. The others talk until
// they are told, say what they were told and end the job with status 3.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "gdn/mpi.h"

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (!gdn::start_mpi()) return 2;
  auto comm = gdn::make_mpi_communicator(nullptr, std::chrono::seconds(2));
  if (!comm) return 2;
  for (int round = 0; round < 1000; ++round) {
    if (round == 5 && (*comm)->rank() == 1) {
      if (how == "kill") std::raise(SIGKILL);
      if (how == "stop") std::raise(SIGSTOP);
      if (how == "exit") ::_exit(7);
    }
    if (const gdn::Status status = (*comm)->agree({}); !status) {
      std::fprintf(stderr, "rank %d after %d rounds: %s\n", (*comm)->rank(), round,
                   status.message().c_str());
      gdn::finish_mpi(3, /*abandon=*/true);
    }
  }
  comm->reset();
  gdn::finish_mpi(0, false);
  return 0;
}
