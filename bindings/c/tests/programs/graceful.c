/* An engine that ends properly with its process, by exit or a signal; without that, "plain". */
#include "check.h"
#include <unistd.h>

int main(int argc, char **argv)
{
    char name[256];
    CHECK(argc == 3);
    /* argv[1]: the metadata server; argv[2]: how to end. */
    transfer_engine_t engine = createTransferEngine(argv[1], "graceful-engine", "127.0.0.1", 0, 1);
    CHECK(engine);
    CHECK(getLocalIpAndPort(engine, name, sizeof name) == 0);
    if (strcmp(argv[2], "plain") != 0)
        enableGracefulShutdown(engine);
    printf("%s\n", name);
    fflush(stdout);
    if (strcmp(argv[2], "exit") == 0)
        exit(0);
    for (;;)
        pause();
}
