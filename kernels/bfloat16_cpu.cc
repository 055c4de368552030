// Whether this library has kernels for bfloat16 that can run.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include <sys/syscall.h>
#include <unistd.h>

// Linux lends tile registers to a process that asks for them: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
extern "C" bool equivit_has_bfloat16() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

#else

extern "C" bool equivit_has_bfloat16() { return false; }

#endif
