# Runs in the guest, to explain a failure: what all threads are at, then, after an empty line, soft-RoCE's
# counters, interfaces, interrupts, who runs, what the kernel said.
#
# Few programs are started: the guest may be slow, and have hundreds of threads.
echo "threads: state, ticks in user mode and in the kernel, place in the kernel, system call with its"
echo "arguments, stack pointer and program counter"
for process in /proc/[0-9]*; do
    # Threads of the kernel have no program.
    [ -e $process/exe ] && read -r name <$process/comm || continue
    case $name in init | sh | busybox | usleep) continue ;; esac
    echo "process ${process#/proc/}, $name"
    for task in $process/task/*; do
        name= stat= place= call=
        { read -r name <$task/comm && read -r stat <$task/stat; } || continue
        read -r place <$task/wchan
        read -r call <$task/syscall
        set -- ${stat##*) }
        echo "  ${task##*/} $name: $1, ${12} and ${13}, $place, $call"
    done
done 2>/dev/null
echo
cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . *
cat /proc/net/dev /proc/net/snmp /proc/interrupts /proc/softirqs /proc/loadavg
ps
dmesg | tail -n 40
