# A later version will do if its interface is the same: of the same first number, and before 1.0 of the same second one.
set(PACKAGE_VERSION "@VERSION@")

string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*)" _pagoda_same "${PACKAGE_VERSION}")
string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*)" _pagoda_asked "${PACKAGE_FIND_VERSION}")
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND _pagoda_same STREQUAL _pagoda_asked)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
# It was built for 64 bits.
if(CMAKE_SIZEOF_VOID_P AND NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
unset(_pagoda_same)
unset(_pagoda_asked)
