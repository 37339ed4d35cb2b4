/*
 * An engine at this host that discovers its transports, or that is told to install rdma: it is there whichever devices are,
 * with soft ones or tcp. Whoever runs this sees which it looks for.
 */
#include "check.h"

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    int discovers = strcmp(argv[2], "discover") == 0;
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", argv[1], argv[1], 0, discovers);
    CHECK(engine);
    if (!discovers)
        CHECK(installTransport(engine, "rdma", NULL));
    destroyTransferEngine(engine);
    return 0;
}
