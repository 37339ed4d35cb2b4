/* An engine that ends properly with its process, by exit or a signal; without that, "plain". */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Has a process do the rest that is forked off one with an engine like that, and ends as it does. */
static void in_fork(void)
{
    int status = 0;
    enableGracefulShutdown(new_engine("tcp"));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        return;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
}

int main(int argc, char **argv)
{
    char name[256];
    CHECK(argc == 3);
    /* argv[1]: the metadata server; argv[2]: how to end. */
    if (strcmp(argv[2], "fork") == 0)
        in_fork();
    transfer_engine_t engine = createTransferEngine(argv[1], "graceful-engine", "127.0.0.1", 0, 1);
    CHECK(engine);
    CHECK(getLocalIpAndPort(engine, name, sizeof name) == 0);
    if (strcmp(argv[2], "plain") != 0)
        enableGracefulShutdown(engine);
    printf("%s\n", name);
    fflush(stdout);
    if (strcmp(argv[2], "exit") == 0)
        exit(0);
    if (strcmp(argv[2], "fork") == 0)
        kill(getpid(), SIGTERM);
    for (;;)
        pause();
}
