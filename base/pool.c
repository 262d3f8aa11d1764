/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns pages of CST_POOL_PAGE, aligned to their size, each cut into spans of 64 KiB.
 * Invariants: 1. a span begins with its header, and holds objects of one size; 2. it is in
 * open[size] exactly while it has objects and a free place, in `free` exactly while it has no
 * objects, in no list while it is full; n_used counts those with objects; 3. the header of a page's
 * first span counts the page's spans with objects; 4. beyond what was given, at most one page has
 * none: the next object may come soon.
 */
#include "base/pool.h"

#include "base/fault.h"
#include "base/mem.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(at, n)
#define ASAN_UNPOISON_MEMORY_REGION(at, n)
#endif

enum { SPAN = 64 << 10, SPANS = CST_POOL_PAGE / SPAN, TOUCH = 4096 };

struct place {
    struct place *next;
};

struct span {
    struct cst_list link;
    struct place *places; /* that were freed */
    uint32_t fresh;       /* offset of the first place that was never used */
    uint32_t size;        /* of an object */
    uint32_t n;           /* objects */
    uint32_t page_n;      /* of a page's first span: spans with objects */
};
_Static_assert(sizeof(struct span) <= CST_POOL_GRAIN, "the first object stands behind it");

static struct span *span_at(const void *in) {
    return (struct span *)((uintptr_t)in & ~(uintptr_t)(SPAN - 1));
}

static struct span *page_at(const void *in) {
    return (struct span *)((uintptr_t)in & ~(uintptr_t)(CST_POOL_PAGE - 1));
}

static struct span *span_of(void *page, size_t i) {
    return (struct span *)(void *)((char *)page + i * SPAN);
}

static bool is_full(const struct span *s) {
    return !s->places && s->fresh + s->size > SPAN;
}

void cst_pool_init(struct cst_pool *pool) {
    for (size_t i = 0; i < CST_COUNT(pool->open); i++)
        cst_list_init(&pool->open[i]);
    cst_list_init(&pool->free);
    pool->n_free = pool->n_used = 0;
}

void cst_pool_deinit(struct cst_pool *pool) {
    assert(!pool->n_used);
    cst_pool_trim(pool);
    assert(!pool->n_free);
}

/* ---- pages ---- */

void *cst_pool_memory(size_t n_pages) {
    char *memory = cst_map(n_pages * CST_POOL_PAGE);

    for (size_t i = 0; memory && i < n_pages * CST_POOL_PAGE; i += TOUCH)
        *(volatile char *)(memory + i) = 0;
    return memory;
}

void cst_pool_give(struct cst_pool *pool, void *memory, size_t n_pages) {
    assert(page_at(memory) == memory);
    for (size_t i = 0; i < n_pages * SPANS; i++)
        cst_list_append(&pool->free, &span_of(memory, i)->link);
    pool->n_free += n_pages * SPANS;
}

static void page_drop(struct cst_pool *pool, struct span *page) {
    assert(!page->page_n);
    for (size_t i = 0; i < SPANS; i++)
        cst_list_unlink(&span_of(page, i)->link);
    pool->n_free -= SPANS;
    ASAN_UNPOISON_MEMORY_REGION(page, CST_POOL_PAGE);
    (void)cst_unmap(page, CST_POOL_PAGE);
}

size_t cst_pool_ahead(const struct cst_pool *pool) {
    return pool->n_free * SPAN;
}

void cst_pool_trim(struct cst_pool *pool) {
    struct cst_list *it = pool->free.next;

    while (it != &pool->free) {
        struct span *page = page_at(cst_list_entry(it, struct span, link));

        it = it->next;
        if (page->page_n)
            continue;
        while (it != &pool->free && page_at(it) == page)
            it = it->next;
        page_drop(pool, page);
    }
}

/* ---- spans ---- */

static struct span *span_take(struct cst_pool *pool, size_t size) {
    struct cst_list *it;
    struct span *s;
    void *page;

    if (!pool->n_free) {
        page = cst_map(CST_POOL_PAGE);
        if (!page)
            return NULL;
        cst_pool_give(pool, page, 1);
    }
    it = cst_list_first(&pool->free);
    s = cst_list_entry(it, struct span, link);
    cst_list_unlink(it);
    cst_list_append(&pool->open[size / CST_POOL_GRAIN], it);
    pool->n_free--;
    pool->n_used++;
    page_at(s)->page_n++;
    s->places = NULL;
    s->fresh = CST_POOL_GRAIN;
    s->size = (uint32_t)size;
    ASAN_POISON_MEMORY_REGION((char *)s + CST_POOL_GRAIN, SPAN - CST_POOL_GRAIN);
    return s;
}

static void span_drop(struct cst_pool *pool, struct span *s) {
    struct span *page = page_at(s);

    cst_list_unlink(&s->link);
    cst_list_prepend(&pool->free, &s->link);
    pool->n_free++;
    pool->n_used--;
    if (!--page->page_n && pool->n_free > SPANS)
        page_drop(pool, page);
}

/* ---- objects ---- */

void *cst_pool_alloc(struct cst_pool *pool, size_t n) {
    size_t size = cst_pool_bytes(n);
    struct cst_list *it;
    struct span *s;
    void *object;

    assert(n && n <= CST_POOL_MAX);
    if (cst_fault_hit(CST_FAULT_ALLOC))
        return NULL;
    it = cst_list_first(&pool->open[size / CST_POOL_GRAIN]);
    s = it ? cst_list_entry(it, struct span, link) : span_take(pool, size);
    if (!s)
        return NULL;
    object = s->places ? (char *)s->places : (char *)s + s->fresh;
    ASAN_UNPOISON_MEMORY_REGION(object, CST_MAX(n, sizeof(struct place)));
    if (s->places)
        s->places = s->places->next;
    else
        s->fresh += s->size;
    s->n++;
    if (is_full(s))
        cst_list_unlink(&s->link);
    return memset(object, 0, n);
}

void *cst_pool_free(struct cst_pool *pool, void *object) {
    struct span *s = span_at(object);
    struct place *place = object;

    if (!object)
        return NULL;
    if (is_full(s))
        cst_list_append(&pool->open[s->size / CST_POOL_GRAIN], &s->link);
    place->next = s->places;
    s->places = place;
    ASAN_POISON_MEMORY_REGION(object, s->size);
    if (!--s->n)
        span_drop(pool, s);
    return NULL;
}
