# find_package(gdn): gdn::gdn for C++ users, gdn::gdn_c for those of the C ABI.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS gdn gdn_c EXPORT gdn-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
                                             LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(GDN_WITH_MPI)
  install(TARGETS gdn_mpi EXPORT gdn-mpi-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT gdn-mpi-targets NAMESPACE gdn:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gdn)
endif()
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT gdn-targets NAMESPACE gdn:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gdn)
configure_package_config_file(cmake/gdn-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/gdn-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gdn)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/gdn-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gdn-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/gdn-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/gdn)
