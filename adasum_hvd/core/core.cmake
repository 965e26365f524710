# The core's objects, with the flags that its results need; for its own library and for Horovod's.
set(ADASUM_CORE_DIR "${CMAKE_CURRENT_LIST_DIR}")

function(adasum_add_core target)
  file(GLOB sources CONFIGURE_DEPENDS "${ADASUM_CORE_DIR}/host/*.cc" "${ADASUM_CORE_DIR}/kernels/*.cc"
       "${ADASUM_CORE_DIR}/reduce/*.cc")
  set(x86 OFF)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(x86 ON)
  else()
    list(FILTER sources EXCLUDE REGEX "/kernels/avx")
  endif()
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PRIVATE "${ADASUM_CORE_DIR}")
  set_target_properties(${target} PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # The same bits on every machine: no fused multiply-add that one instruction set has and another has not.
  target_compile_options(${target} PRIVATE -O3 -pthread -ffp-contract=off -fno-fast-math -Wno-psabi)
  if(x86)
    set(kernels "${ADASUM_CORE_DIR}/kernels")
    set_source_files_properties("${kernels}/portable.cc" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
      "-march=x86-64;-mno-avx;-mno-fma;-mno-f16c") # Horovod's own flags ask for AVX
    set_source_files_properties("${kernels}/avx2.cc" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
      "-mavx2;-mfma;-mf16c")
    set_source_files_properties("${kernels}/avx512.cc" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
      "-mavx512f;-mavx512vl;-mavx512bw;-mavx512dq;-mavx2;-mfma;-mf16c;-mprefer-vector-width=512")
  endif()
endfunction()
