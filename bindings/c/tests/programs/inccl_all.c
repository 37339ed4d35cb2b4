/* All collectives, types and operations, in both modes, blocking and started: WORLD_SIZE CONTROLLER RANK. */
#include "inccl_check.h"

static int world, rank;

/* Of a packet, of one segment, of several windows. */
static const size_t counts[] = {0, 1, 700, 30000, 700001};

static int32_t element(int of, size_t index)
{
    return (int32_t)((uint32_t)index * 7u + (uint32_t)of * 1000003u);
}

static int32_t sum(size_t index)
{
    uint32_t total = 0;
    for (int of = 0; of < world; of++)
        total += (uint32_t)element(of, index);
    return (int32_t)total;
}

static void six(struct inccl_communicator *comm, size_t count)
{
    size_t all = count * (size_t)world, own = count * (size_t)rank;
    int32_t *source = malloc(all * 4 + 4), *result = malloc(all * 4 + 4);
    for (size_t i = 0; i < all; i++)
        source[i] = element(rank, i);
    memset(result, 0x55, all * 4);
    GOOD(inccl_allreduce_v2(comm, source, result, count, INCCL_INT32, INCCL_SUM));
    for (size_t i = 0; i < count; i++)
        CHECK(result[i] == sum(i));
    memset(result, 0x55, all * 4);
    GOOD(inccl_reduce_v2(comm, source, result, count, INCCL_INT32, INCCL_SUM, world - 1));
    for (size_t i = 0; i < count; i++)
        CHECK(result[i] == (rank == world - 1 ? sum(i) : 0x55555555));
    memcpy(result, source, count * 4);
    GOOD(inccl_broadcast_v2(comm, result, result, count, INCCL_INT32, 0));
    for (size_t i = 0; i < count; i++)
        CHECK(result[i] == element(0, i));
    GOOD(inccl_barrier_v2(comm));
    GOOD(inccl_reducescatter_v2(comm, source, result, count, INCCL_INT32, INCCL_SUM));
    for (size_t i = 0; i < count; i++)
        CHECK(result[i] == sum(own + i));
    GOOD(inccl_allgather_v2(comm, source, result, count, INCCL_INT32));
    for (size_t i = 0; i < all; i++)
        CHECK(result[i] == element((int)(i / count), i % count));
    /* In place. */
    for (int mode = INCCL_WRITE; mode <= INCCL_SEND; mode++) {
        inccl_handle_t handle;
        struct inccl_call call = {INCCL_ALLGATHER, INCCL_INT32, 0, 0, mode, count, result + own, result};
        memset(result, 0x55, all * 4);
        memcpy(result + own, source, count * 4);
        GOOD(inccl_start_v2(comm, &call, &handle));
        GOOD(inccl_wait_v2(handle, 60000));
        for (size_t i = 0; i < all; i++)
            CHECK(result[i] == element((int)(i / count), i % count));
        memcpy(result, source, all * 4);
        call = (struct inccl_call){INCCL_REDUCESCATTER, INCCL_INT32, INCCL_SUM, 0, mode, count, result, result + own};
        GOOD(inccl_start_v2(comm, &call, &handle));
        GOOD(inccl_wait_v2(handle, 60000));
        for (size_t i = 0; i < count; i++)
            CHECK(result[own + i] == sum(own + i));
    }
    inccl_allreduce_sendrecv(comm, source, (uint32_t)count, source);
    for (size_t i = 0; i < count; i++)
        CHECK(source[i] == sum(i));
    free(result);
    free(source);
}

static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};

/* Whole numbers by their bits: any of integers, and those up to 15 of floats. */
static void set(void *place, int type, uint64_t value)
{
    static const uint16_t halves[] = {0,      0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
                                      0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};
    float single = (float)value;
    double whole = (double)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    uint16_t upper = (uint16_t)(bits >> 16);
    CHECK(type < INCCL_FLOAT16 || value < 16);
    const void *of_type = type == INCCL_FLOAT16    ? (const void *)&halves[value & 15]
                          : type == INCCL_BFLOAT16 ? (const void *)&upper
                          : type == INCCL_FLOAT32  ? (const void *)&single
                          : type == INCCL_FLOAT64  ? (const void *)&whole
                                                   : (const void *)&value; /* of little-endian machines */
    memcpy(place, of_type, sizes[type]);
}

/*
 * Of two ranks and of three, all operations have different results, which are whole numbers. The last element of rank 1
 * is all ones in integers: -1, or the most there is.
 */
static uint64_t operand(int of, int type, int operation, size_t index)
{
    static const uint64_t operands[3][3] = {{2, 1, 3}, {6, 1, 5}, {1, 4, 1}};
    if (index == 8 && of == 1 && type < INCCL_FLOAT16 && operation != INCCL_AVERAGE)
        return UINT64_MAX;
    return operands[of % 3][index % 3];
}

static uint64_t combined(int type, int operation, size_t index)
{
    int is_signed = type < INCCL_FLOAT16 && type % 2 == 0;
    uint64_t result = operand(0, type, operation, index);
    for (int of = 1; of < world; of++) {
        uint64_t other = operand(of, type, operation, index);
        int less = is_signed ? (int64_t)other < (int64_t)result : other < result;
        switch (operation) {
        case INCCL_SUM:
        case INCCL_AVERAGE: result += other; break;
        case INCCL_PRODUCT: result *= other; break;
        case INCCL_MINIMUM: result = less ? other : result; break;
        case INCCL_MAXIMUM: result = less ? result : other; break;
        case INCCL_BIT_AND: result &= other; break;
        case INCCL_BIT_OR: result |= other; break;
        default: result ^= other;
        }
    }
    return operation == INCCL_AVERAGE ? result / (uint64_t)world : result;
}

static void types_and_operations(struct inccl_communicator *comm)
{
    for (int type = INCCL_INT8; type <= INCCL_FLOAT64; type++) {
        for (int operation = INCCL_SUM; operation <= INCCL_BIT_XOR; operation++) {
            /* Off by one byte, since any alignment will do. */
            unsigned char source[8 * 9 + 1], result[8 * 9 + 1], wanted[8 * 9 + 1];
            memset(result, 0x55, sizeof result);
            memset(wanted, 0x55, sizeof wanted);
            for (size_t i = 0; i < 9; i++)
                set(source + 1 + i * sizes[type], type, operand(rank, type, operation, i));
            int code = inccl_allreduce_v2(comm, source + 1, result + 1, 9, type, operation);
            if (type >= INCCL_FLOAT16 && operation >= INCCL_BIT_AND) {
                CHECK(code == INCCL_ERROR_UNSUPPORTED);
                continue;
            }
            for (size_t i = 0; i < 9; i++)
                set(wanted + 1 + i * sizes[type], type, combined(type, operation, i));
            CHECK(code == INCCL_SUCCESS && memcmp(result, wanted, sizeof result) == 0);
        }
    }
    double values[2] = {rank + 0.25, -rank}, most[2];
    GOOD(inccl_allreduce_v2(comm, values, most, 2, INCCL_FLOAT64, INCCL_MAXIMUM));
    CHECK(most[0] == world - 1 + 0.25 && most[1] == 0);
    uint64_t bit = (uint64_t)1 << (rank + 40), bits;
    GOOD(inccl_allreduce_v2(comm, &bit, &bits, 1, INCCL_UINT64, INCCL_BIT_OR));
    CHECK(bits == (((uint64_t)1 << world) - 1) << 40);
}

/* Several at a time, from registered memory, again and again. */
static void started(struct inccl_communicator *comm)
{
    enum { CALLS = 20, COUNT = 20000 };
    static int32_t source[CALLS][COUNT], result[CALLS][COUNT];
    inccl_handle_t handles[CALLS];
    GOOD(inccl_register_v2(comm, source, sizeof source));
    GOOD(inccl_register_v2(comm, result, sizeof result));
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < CALLS; i++) {
            struct inccl_call call = {INCCL_ALLREDUCE, INCCL_INT32, INCCL_SUM, 0, i % 2, COUNT, source[i], result[i]};
            for (size_t at = 0; at < COUNT; at++)
                source[i][at] = element(rank, at + (size_t)(i + round));
            GOOD(inccl_start_v2(comm, &call, &handles[i]));
        }
        /* A handle that was not told the end uses it, and no call has a registration of its own. */
        CHECK(inccl_deregister_v2(comm, source) == INCCL_ERROR_BUSY);
        for (int i = CALLS - 1; i >= 0; i--) {
            GOOD(inccl_wait_v2(handles[i], 60000));
            CHECK(inccl_wait_v2(handles[i], 0) == INCCL_ERROR_ARGUMENT);
            for (size_t at = 0; at < COUNT; at++)
                CHECK(result[i][at] == sum(at + (size_t)(i + round)));
        }
    }
    GOOD(inccl_deregister_v2(comm, source));
    GOOD(inccl_deregister_v2(comm, result));
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    world = atoi(argv[1]);
    rank = atoi(argv[3]);
    struct inccl_group *group = inccl_group_create(world, argv[2], rank);
    CHECK(group);
    /* Two that live side by side. */
    struct inccl_communicator *first = inccl_communicator_create(group), *second = inccl_communicator_create(group);
    CHECK(first && second && first != second);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        six(i % 2 ? second : first, counts[i]);
    types_and_operations(first);
    started(second);
    inccl_communicator_destroy(first);
    inccl_group_destroy(group);
    GOOD(inccl_barrier_v2(second));
    inccl_communicator_destroy(second);
    CHECK(*inccl_last_error());
    puts("done");
    return 0;
}
