// The one translation unit that holds doctest's implementation and main(); tests are the other
// files of this folder, each `#include <doctest/doctest.h>`.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
