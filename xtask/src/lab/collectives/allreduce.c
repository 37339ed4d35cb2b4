/* AllReduce over MPI, measured as `millstream allreduce` measures: each rank fills its vector anew, meets the others in a short
 * call, and times the one after it.
 *
 *   allreduce WARM_UP CALLS BYTES...
 *
 * Prints a line for each size: its bytes, and the mean and the median of a call in microseconds on the rank where it
 * is greatest. The last result is checked.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static int32_t element(int rank, size_t index) { return (int32_t)(index * 7 % 1000) + rank; }

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 4) MPI_Abort(MPI_COMM_WORLD, 2);
    int warm_up = atoi(argv[1]), calls = atoi(argv[2]);
    if (warm_up < 0 || calls < 1) MPI_Abort(MPI_COMM_WORLD, 2);
    double *took = calloc(calls, sizeof *took);
    for (int argument = 3; argument < argc; argument++) {
        size_t bytes = strtoull(argv[argument], NULL, 10), count = bytes / 4;
        int32_t *own = malloc(bytes), *sum = malloc(bytes);
        if (!took || !own || !sum) MPI_Abort(MPI_COMM_WORLD, 3);
        for (int call = -warm_up; call < calls; call++) {
            for (size_t i = 0; i < count; i++) own[i] = element(rank, i);
            int32_t one = 1, all;
            MPI_Allreduce(&one, &all, 1, MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);
            double start = MPI_Wtime();
            MPI_Allreduce(own, sum, (int)count, MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);
            if (call >= 0) took[call] = (MPI_Wtime() - start) * 1e6;
        }
        for (size_t i = 0; i < count; i++) {
            int32_t wanted = element(0, i) * world + world * (world - 1) / 2;
            if (sum[i] != wanted) MPI_Abort(MPI_COMM_WORLD, 4);
        }
        double own_figures[2] = {0, 0}, figures[2];
        for (int call = 0; call < calls; call++) own_figures[0] += took[call] / calls;
        qsort(took, calls, sizeof *took, ascending);
        own_figures[1] = took[calls / 2];
        MPI_Reduce(own_figures, figures, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) printf("%zu %.1f %.1f\n", bytes, figures[0], figures[1]);
        free(own);
        free(sum);
    }
    MPI_Finalize();
    return 0;
}
