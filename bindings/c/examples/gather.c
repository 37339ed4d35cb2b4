/* One rank that finds what went wrong, and does not wait: WORLD_SIZE CONTROLLER RANK. */
#include <inccl.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, inccl_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    int world = atoi(argv[1]), rank = atoi(argv[3]);

    struct inccl_options options = {.size = sizeof options, .controller = argv[2], .join_timeout_ms = 20000};
    struct inccl_group *group;
    struct inccl_communicator *comm;
    if (inccl_group_create_v2(world, rank, &options, &group) != INCCL_SUCCESS)
        return failed("no group");
    if (inccl_communicator_create_v2(group, &comm) != INCCL_SUCCESS)
        return failed("no communicator");

    size_t count = 1 << 16;
    float *mine = malloc(count * sizeof *mine), *all = malloc(world * count * sizeof *all);
    for (size_t i = 0; i < count; i++)
        mine[i] = rank + 0.5f;
    if (inccl_register_v2(comm, mine, count * sizeof *mine) != INCCL_SUCCESS ||
        inccl_register_v2(comm, all, world * count * sizeof *all) != INCCL_SUCCESS)
        return failed("memory");

    struct inccl_call call = {
        .collective = INCCL_ALLGATHER, .type = INCCL_FLOAT32, .count = count, .source = mine, .destination = all};
    inccl_handle_t handle;
    if (inccl_start_v2(comm, &call, &handle) != INCCL_SUCCESS)
        return failed("not started");
    int code;
    while ((code = inccl_wait_v2(handle, 100)) == INCCL_IN_PROGRESS)
        ; /* something else can be done here */
    if (code != INCCL_SUCCESS)
        return failed("no result");
    printf("rank %d has %g to %g\n", rank, all[0], all[world * count - 1]);

    inccl_communicator_destroy(comm);
    inccl_group_destroy(group);
    free(all);
    free(mine);
    return 0;
}
