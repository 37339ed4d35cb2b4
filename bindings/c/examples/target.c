/* Offers memory to others, says where, and ends when a message has come: what it got is printed. */
#include <millstream.h>
#include <stdio.h>
#include <string.h>

static char memory[1 << 20];

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, millstream_last_error());
    return 1;
}

int main(void)
{
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 0);
    if (!engine || !installTransport(engine, "tcp", NULL))
        return failed("no engine");
    if (registerLocalMemory(engine, memory, sizeof memory, "*", 1) != 0)
        return failed("no memory registered");

    /* What an initiator has to know: the name of the segment, and an address in it. */
    char name[256];
    if (getLocalIpAndPort(engine, name, sizeof name) != 0)
        return failed("no name");
    printf("%s %p\n", name, (void *)memory);
    fflush(stdout);

    int count = 0;
    notify_msg_t *messages = NULL;
    while (!messages)
        messages = getNotifsFromEngine(engine, &count);
    printf("%s says %s: %s\n", messages[0].name, messages[0].msg, memory);
    freeNotifsMsgBuf(messages, count);

    unregisterLocalMemory(engine, memory);
    destroyTransferEngine(engine);
    return 0;
}
