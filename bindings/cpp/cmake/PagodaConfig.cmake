# find_package(Pagoda): pagoda::pagoda is libpagoda.so with its headers, pagoda::static is libpagoda.a. Found from where
# this file lies, so that the folder it is installed in can be moved.
get_filename_component(_pagoda_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET pagoda::pagoda)
  add_library(pagoda::pagoda SHARED IMPORTED)
  set_target_properties(pagoda::pagoda PROPERTIES
    IMPORTED_LOCATION "${_pagoda_prefix}/lib/libpagoda.so"
    IMPORTED_SONAME "libpagoda.so.@ABI@"
    INTERFACE_INCLUDE_DIRECTORIES "${_pagoda_prefix}/include")

  add_library(pagoda::static STATIC IMPORTED)
  set_target_properties(pagoda::static PROPERTIES
    IMPORTED_LOCATION "${_pagoda_prefix}/lib/libpagoda.a"
    INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl"
    INTERFACE_INCLUDE_DIRECTORIES "${_pagoda_prefix}/include")
endif()

foreach(_pagoda_file lib/libpagoda.so lib/libpagoda.a include/pagoda.h)
  if(NOT EXISTS "${_pagoda_prefix}/${_pagoda_file}")
    set(Pagoda_FOUND FALSE)
    set(Pagoda_NOT_FOUND_MESSAGE "${_pagoda_prefix}/${_pagoda_file} is missing: install Pagoda there again (make install)")
  endif()
endforeach()
unset(_pagoda_file)
unset(_pagoda_prefix)
