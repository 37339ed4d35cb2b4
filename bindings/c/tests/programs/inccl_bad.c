/* What is null, wrong, destroyed or out of range is a code, or NULL, and nothing hangs: CONTROLLER. */
#define _POSIX_C_SOURCE 200809L
#include "inccl_check.h"
#include <sys/wait.h>
#include <unistd.h>

static int32_t vector[8];

static int says(const char *text)
{
    return strstr(inccl_last_error(), text) != NULL;
}

/* No function takes this for a group. */
static void no_group(struct inccl_group *group)
{
    struct inccl_communicator *comm = (struct inccl_communicator *)vector;
    CHECK(!inccl_communicator_create(group));
    CHECK(inccl_communicator_create_v2(group, &comm) == INCCL_ERROR_ARGUMENT);
    CHECK(comm == (struct inccl_communicator *)vector);
    inccl_group_destroy(group);
}

/* Nor this for a communicator. */
static void no_communicator(struct inccl_communicator *comm)
{
    inccl_handle_t handle = 77;
    struct inccl_call call = {INCCL_ALLREDUCE, INCCL_INT32, INCCL_SUM, 0, 0, 8, vector, vector};
    inccl_allreduce_write(comm, vector, 8, vector);
    inccl_allreduce_sendrecv(comm, vector, 8, vector);
    inccl_communicator_destroy(comm);
    CHECK(inccl_communicator_error_v2(comm) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allreduce_v2(comm, vector, vector, 8, INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_reduce_v2(comm, vector, vector, 8, INCCL_INT32, INCCL_SUM, 0) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_broadcast_v2(comm, vector, vector, 8, INCCL_INT32, 0) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_barrier_v2(comm) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_reducescatter_v2(comm, vector, vector, 8, INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allgather_v2(comm, vector, vector, 8, INCCL_INT32) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_start_v2(comm, &call, &handle) == INCCL_ERROR_ARGUMENT && handle == 77);
    CHECK(inccl_register_v2(comm, vector, sizeof vector) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_deregister_v2(comm, vector) == INCCL_ERROR_ARGUMENT);
}

static void groups_that_cannot_be(const char *controller)
{
    struct inccl_group *group = NULL;
    struct inccl_options options = {sizeof options, controller, NULL, NULL, 300, 0};
    CHECK(!inccl_group_create(0, controller, 0) && says("world_size is 0"));
    CHECK(!inccl_group_create(-5, controller, 0) && says("world_size is -5"));
    CHECK(!inccl_group_create(2, controller, 2) && says("ranks are 0 to 1"));
    CHECK(!inccl_group_create(2, controller, -1) && says("rank is -1"));
    CHECK(!inccl_group_create(2147483647, controller, 0) && says("out of range"));
    CHECK(!inccl_group_create(1, NULL, 0) && says("INCCL_CONTROLLER"));
    CHECK(!inccl_group_create(1, "", 0) && says("INCCL_CONTROLLER"));
    CHECK(!inccl_group_create(1, "\xff", 0) && says("UTF-8"));
    CHECK(!inccl_group_create(1, "127.0.0.1:0x7", 0) && says("127.0.0.1:0x7"));
    /* Nobody listens there. */
    CHECK(!inccl_group_create(1, "127.0.0.1:1", 0) && says("cannot reach the controller at 127.0.0.1:1"));
    CHECK(inccl_group_create_v2(1, 0, &options, NULL) == INCCL_ERROR_ARGUMENT);
    options.controller = "127.0.0.1:1";
    CHECK(inccl_group_create_v2(1, 0, &options, &group) == INCCL_ERROR_CONTROLLER && !group);
    options.controller = controller;
    CHECK(inccl_group_create_v2(2, 0, &options, &group) == INCCL_ERROR_PEER && says("did not join in time") && !group);
    options.size = 8;
    CHECK(inccl_group_create_v2(1, 0, &options, &group) == INCCL_ERROR_ARGUMENT && says("size 8"));
    options.size = sizeof options;
    options.bind = "eth0";
    CHECK(inccl_group_create_v2(1, 0, &options, &group) == INCCL_ERROR_ARGUMENT && says("eth0"));
    options.bind = "192.0.2.1";
    CHECK(inccl_group_create_v2(1, 0, &options, &group) == INCCL_ERROR_DEVICE && says("192.0.2.1"));
    options.bind = NULL;
    options.group = "a\nb";
    CHECK(inccl_group_create_v2(1, 0, &options, &group) == INCCL_ERROR_ARGUMENT && says("name of a group"));
    setenv("INCCL_BIND", "nowhere", 1);
    CHECK(!inccl_group_create(1, controller, 0) && says("nowhere"));
    setenv("INCCL_BIND", "", 1);
    setenv("INCCL_CALL_TIMEOUT_MS", "soon", 1);
    CHECK(!inccl_group_create(1, controller, 0) && says("INCCL_CALL_TIMEOUT_MS"));
    unsetenv("INCCL_CALL_TIMEOUT_MS");
}

static void calls_that_cannot_be(struct inccl_communicator *comm)
{
    inccl_handle_t handle = 0;
    struct inccl_call good = {INCCL_ALLREDUCE, INCCL_INT32, INCCL_SUM, 0, 0, 8, vector, vector}, call = good;
    size_t huge[] = {SIZE_MAX, SIZE_MAX / 4, (size_t)1 << 62, (size_t)1 << 61, (size_t)1 << 50};
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++)
        CHECK(inccl_allreduce_v2(comm, vector, vector, huge[i], INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allreduce_v2(comm, NULL, vector, 1, INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT && says("null"));
    CHECK(inccl_allreduce_v2(comm, vector, NULL, 1, INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allreduce_v2(comm, NULL, NULL, 0, INCCL_INT32, INCCL_SUM) == INCCL_SUCCESS);
    CHECK(inccl_allreduce_v2(comm, vector, vector + 1, 7, INCCL_INT32, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(says("overlap"));
    CHECK(inccl_allreduce_v2(comm, vector, vector, 8, 12, INCCL_SUM) == INCCL_ERROR_ARGUMENT && says("type is 12"));
    CHECK(inccl_allreduce_v2(comm, vector, vector, 8, 260, INCCL_SUM) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allreduce_v2(comm, vector, vector, 8, INCCL_INT32, -1) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_allreduce_v2(comm, vector, vector, 8, INCCL_FLOAT32, INCCL_BIT_OR) == INCCL_ERROR_UNSUPPORTED);
    CHECK(inccl_broadcast_v2(comm, vector, vector, 8, INCCL_INT32, 1) == INCCL_ERROR_ARGUMENT && says("root 1"));
    CHECK(inccl_broadcast_v2(comm, vector, vector, 8, INCCL_INT32, -1) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_start_v2(comm, NULL, &handle) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_start_v2(comm, &good, NULL) == INCCL_ERROR_ARGUMENT);
    call.collective = 6;
    CHECK(inccl_start_v2(comm, &call, &handle) == INCCL_ERROR_ARGUMENT && says("collective is 6"));
    call = good;
    call.mode = 2;
    CHECK(inccl_start_v2(comm, &call, &handle) == INCCL_ERROR_ARGUMENT && says("mode is 2"));
    CHECK(inccl_wait_v2(handle, 0) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_test_v2(UINT64_MAX) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_cancel_v2((uint64_t)(uintptr_t)comm) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_register_v2(comm, NULL, 8) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_register_v2(comm, vector, 0) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_register_v2(comm, vector, SIZE_MAX) == INCCL_ERROR_ARGUMENT);
    CHECK(inccl_deregister_v2(comm, vector) == INCCL_ERROR_ARGUMENT);
    /* None of it was the end of the communicator. */
    vector[3] = 5;
    GOOD(inccl_start_v2(comm, &good, &handle));
    GOOD(inccl_wait_v2(handle, UINT64_MAX));
    CHECK(inccl_wait_v2(handle, 0) == INCCL_ERROR_ARGUMENT && vector[3] == 5);
    GOOD(inccl_communicator_error_v2(comm));
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    CHECK(*inccl_last_error() == 0);
    no_group(NULL);
    no_group((struct inccl_group *)vector);
    no_group((struct inccl_group *)UINTPTR_MAX);
    no_communicator(NULL);
    no_communicator((struct inccl_communicator *)vector);
    groups_that_cannot_be(argv[1]);
    struct inccl_group *group = inccl_group_create(1, argv[1], 0);
    CHECK(group);
    struct inccl_communicator *comm = inccl_communicator_create(group);
    CHECK(comm);
    no_communicator((struct inccl_communicator *)group);
    no_group((struct inccl_group *)comm);
    calls_that_cannot_be(comm);
    /* A process that is forked off has neither. */
    pid_t child = fork();
    if (child == 0) {
        no_communicator(comm);
        CHECK(says("forked"));
        no_group(group);
        _exit(0); /* what the threads had that it has not got is no leak */
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    GOOD(inccl_barrier_v2(comm));
    inccl_communicator_destroy(comm);
    no_communicator(comm);
    inccl_group_destroy(group);
    no_group(group);
    puts("done");
    return 0;
}
