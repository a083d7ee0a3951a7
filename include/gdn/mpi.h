// Ranks as MPI processes, serving host memory. In a library of its own, gdn_mpi, built where CMake
// finds MPI; the rest of gdn knows nothing of it.
#pragma once

#include <chrono>
#include <memory>

#include "gdn/communicator.h"
#include "gdn/status.h"

namespace gdn {

// MPI_Init_thread where nobody has called it yet. All MPI calls come from the caller's thread.
Status start_mpi();

// The end of a process that start_mpi() began. exit_code 0 after an orderly run: MPI_Finalize,
// which waits for the other ranks. `abandon`: MPI_Abort with that code, which ends them; for a rank
// that cannot go on while others may wait for it.
void finish_mpi(int exit_code, bool abandon);

// A rank of `mpi_comm`, the address of an MPI_Comm, or of MPI_COMM_WORLD for null. Duplicates it,
// so every rank of it calls this. `timeout`: how long a collective waits for the others. A rank
// that stays away, leaves or dies gives kPeerFailed on all others, and ends this communicator:
// later calls return the same error. Every other error leaves it working.
Result<std::unique_ptr<Communicator>> make_mpi_communicator(
    const void* mpi_comm = nullptr, std::chrono::milliseconds timeout = std::chrono::minutes(5));

}  // namespace gdn
