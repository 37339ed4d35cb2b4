# Runs in the guest, to explain a failure: soft-RoCE's counters, interfaces, interrupts, who runs,
# what the kernel said.
cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . *
cat /proc/net/dev /proc/net/snmp /proc/interrupts /proc/softirqs /proc/loadavg
ps
dmesg | tail -n 40
