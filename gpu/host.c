/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host backend: a slab is a sealed memfd. Owns nothing but the slabs that its callers hold.
 * slab_make() runs on any thread, for prefaulting takes milliseconds.
 *
 * Invariants
 *   1. A slab leaves here mapped, with all of its pages present and charged to this process, and
 *      sealed: whoever gets the descriptor can neither resize it (no fault in our copies) nor,
 *      unless it is staging, write it in any way. The seals hold for every holder of any later
 *      descriptor of the file, so the descriptor is passed as it is.
 *   2. The mapping is made before the seal F_SEAL_FUTURE_WRITE, else it could not be writable.
 *   3. The file is 0600 and never executable; its pages are left out of core dumps.
 *   4. Failure leaves nothing open.
 */
#include "base/err.h"
#include "base/fault.h"
#include "base/macros.h"
#include "gpu/gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

static void slab_drop(struct cst_mem_slab *slab) {
    if (slab->base)
        (void)munmap(slab->base, slab->size);
    cst_close(slab->fd);
    *slab = CST_MEM_SLAB_NULL;
}

static int make_file(struct cst_mem_slab *slab) {
    if (cst_fault_hit(CST_FAULT_MAP))
        return cst_err(-ENOMEM);
    slab->fd = memfd_create("cistern-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (slab->fd < 0 && errno == EINVAL)
        slab->fd = memfd_create("cistern-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (slab->fd < 0 || fchmod(slab->fd, 0600) < 0)
        return cst_err(-errno);
    if (cst_fault_hit(CST_FAULT_MAP))
        return cst_err(-ENOMEM);
    if (ftruncate(slab->fd, (off_t)slab->size) < 0)
        return cst_err(-errno);
    return 0;
}

/* Takes all pages now: later faults would be charged to whoever touches first, and could kill. */
static int prefault(const struct cst_mem_slab *slab) {
    if (madvise(slab->base, slab->size, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return cst_err(-errno);
    if (fallocate(slab->fd, 0, 0, (off_t)slab->size) < 0)
        return cst_err(-errno);
    for (uint64_t at = 0; at < slab->size; at += 4096)
        *(volatile uint8_t *)(slab->base + at) = 0;
    return 0;
}

static int map_file(struct cst_mem_slab *slab) {
    void *base;

    if (cst_fault_hit(CST_FAULT_MAP))
        return cst_err(-ENOMEM);
    base = mmap(NULL, slab->size, PROT_READ | PROT_WRITE, MAP_SHARED, slab->fd, 0);
    if (base == MAP_FAILED)
        return cst_err(-errno);
    slab->base = base;
    (void)madvise(base, slab->size, MADV_HUGEPAGE); /* a hint: hosts without huge pages refuse */
    if (madvise(base, slab->size, MADV_DONTDUMP) < 0)
        return cst_err(-errno);
    return prefault(slab);
}

static int slab_make(struct cst_mem_slab *out, uint64_t size, enum cst_slab_use use) {
    cst_auto(slab_drop) struct cst_mem_slab slab = CST_MEM_SLAB_NULL;
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, r;

    if (size < 1 || size > INT64_MAX / 2)
        return cst_err(-EINVAL);
    slab.size = cst_align_up(size, (uint64_t)sysconf(_SC_PAGESIZE));
    r = make_file(&slab);
    if (!r)
        r = map_file(&slab);
    if (r)
        return r;
    if (use == CST_SLAB_READ_ONLY)
        seals |= F_SEAL_FUTURE_WRITE;
    if (fcntl(slab.fd, F_ADD_SEALS, seals) < 0)
        return cst_err(-errno);
    *out = slab;
    slab = CST_MEM_SLAB_NULL;
    return 0;
}

const struct cst_mem_ops cst_mem_host = {
    .name = "host",
    .slab_make = slab_make,
    .slab_drop = slab_drop,
};
