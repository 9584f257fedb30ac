/* Stands in for the reference BLAS that mlx's Linux CPU build links: exports cblas_sgemm, hands it to a fast one.
 *
 * Loaded with RTLD_GLOBAL before mlx, so that mlx's own lookup of cblas_sgemm finds this one. The fast functions
 * come in by pointer, since the library that holds them exports them under other names.
 */
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void (*sgemv_fn)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static sgemm_fn fast_sgemm;
static sgemv_fn fast_sgemv;

void ingot_blas_use(void *sgemm, void *sgemv) {
  fast_sgemm = (sgemm_fn)sgemm;
  fast_sgemv = (sgemv_fn)sgemv;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
  /* One row is a matrix times a vector; gemm would copy the whole weight matrix to compute it. */
  if (m == 1 && order == ROW_MAJOR) {
    int step = ta == NO_TRANS ? 1 : lda;
    if (tb == NO_TRANS)
      fast_sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
    else
      fast_sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
    return;
  }
  fast_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
