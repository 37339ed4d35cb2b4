/* One rank of an AllReduce: WORLD_SIZE CONTROLLER RANK. */
#include <inccl.h>
#include <stdlib.h>

int main(int argc, char *argv[]) {
    if (argc != 4)
        return 2;
    int world_size = atoi(argv[1]);
    const char *controller_ip = argv[2];
    int rank = atoi(argv[3]);

    struct inccl_group *group = inccl_group_create(
        world_size, controller_ip, rank);

    struct inccl_communicator *comm = inccl_communicator_create(group);

    int32_t src_data[1024];
    int32_t dst_data[1024];
    for (int i = 0; i < 1024; i++) {
        src_data[i] = rank + 1;
    }

    inccl_allreduce_write(comm, src_data, 1024, dst_data);

    inccl_communicator_destroy(comm);
    inccl_group_destroy(group);

    return 0;
}
