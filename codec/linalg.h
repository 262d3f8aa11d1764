/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense linear algebra: the one seam to OpenBLAS and its LAPACK.
 *
 * Matrices are row-major: element (i, j) of an m x n matrix lies at a[i * lda + j], lda >= n. No
 * heap of ours (OpenBLAS keeps a buffer of its own). Any number of threads may call at a time;
 * calls take turns, each runs in its caller's thread. The same call with the same values gives the
 * same bits within one machine and build; elsewhere results differ by rounding, so what is decoded
 * through here is bound (docs/codec-format.md section 8), not exact. Values must be finite.
 *
 * Work: what cst_*_work() says, in floats, alignment 64. Conditions: see below.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CST_LINALG_E_SINGULAR = 1, /* not positive definite */
    CST_LINALG_E_STUCK,        /* the iteration did not converge */
};

/*
 * OpenBLAS chooses its kernels while it is loaded, by the processor's model. Version 0.3.21 takes
 * all that it doesn't know, Emerald Rapids among them, for a Prescott without AVX, where products
 * take three times as long. It has no call to choose again, but reads this variable: the value that
 * it should have, or NULL where the choice will do. For base/restart.h; libraries leave the process
 * that they are loaded into as it is.
 */
#define CST_LINALG_VARIABLE "OPENBLAS_CORETYPE"
const char *cst_linalg_core_type(void);

/* C = alpha * op(A) op(B) + beta * C, where op transposes if asked. op(A) is m x k, op(B) k x n. */
void cst_gemm(bool transpose_a, bool transpose_b, uint32_t m, uint32_t n, uint32_t k, float alpha,
              const float *a, uint32_t lda, const float *b, uint32_t ldb, float beta, float *c,
              uint32_t ldc);

/* Upper triangle of the n x n matrix C = alpha * A^T A + beta * C, A of m rows. */
void cst_gram(uint32_t m, uint32_t n, float alpha, const float *a, uint32_t lda, float beta,
              float *c, uint32_t ldc);

/* The same of the m x m matrix C = alpha * A A^T + beta * C, A of n columns. */
void cst_gram_rows(uint32_t m, uint32_t n, float alpha, const float *a, uint32_t lda, float beta,
                   float *c, uint32_t ldc);

/* Copies the upper triangle to the lower one. */
void cst_symmetrize(uint32_t n, float *a, uint32_t lda);

/*
 * Eigenvalues of a symmetric matrix, of which the upper triangle is read, in rising order, and the
 * eigenvector of the i-th one in row i, of unit length. Divide and conquer (LAPACK ssyevd).
 */
size_t cst_eigen_work(uint32_t n);
int cst_eigen(uint32_t n, float *a, uint32_t lda, float *values, float *work);

/*
 * Makes the n rows of m >= n values orthonormal: row i becomes a unit vector in the span of rows
 * 0 .. i (Householder QR of the transpose; LAPACK sgeqrf, sorgqr). Rows that depend on earlier
 * ones become some vectors that complete the set.
 */
size_t cst_orthonormalize_work(uint32_t n);
int cst_orthonormalize(uint32_t m, uint32_t n, float *a, uint32_t lda, float *work);

/*
 * Solves A X = B for a symmetric positive definite n x n matrix, of which the upper triangle is
 * read and overwritten by its factor; B is n x columns and becomes X. In double: normal equations
 * square the condition of their data.
 */
int cst_solve(uint32_t n, uint32_t columns, double *a, uint32_t lda, double *b, uint32_t ldb);
