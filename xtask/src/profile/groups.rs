//! What a sample is part of.

use super::owners::Owners;
use super::samples::{Frame, Sample};

/// Functions of the kernel that copy payload.
const COPIES: &[&str] =
    &["_copy_from_iter", "_copy_to_iter", "copy_page_from_iter", "copy_page_to_iter"];

/// Groups of the kernel, by functions that are being called: the first that fits counts, so that
/// waking a reader, which is done while sending, is no part of sending.
const KERNEL: &[(&str, &[&str])] = &[
    (PAGE_FAULTS, &["asm_exc_page_fault"]),
    (
        WAKES,
        &[
            "futex",
            "eventfd",
            "do_sys_poll",
            "try_to_wake_up",
            "__wake_up",
            "schedule",
            "finish_task_switch",
        ],
    ),
    ("kernel: socket lookup", &["udp4_lib_lookup", "udp6_lib_lookup"]),
    (
        "kernel: buffers",
        &[
            "alloc_skb",
            "sock_alloc_send_pskb",
            "skb_release",
            "kfree_skb",
            "skb_free",
            "napi_consume_skb",
            "consume_skb",
            "page_frag",
            "skb_consume_udp",
            "kmem_cache",
            "__alloc_frozen_pages",
            "free_frozen_page",
        ],
    ),
    (
        "kernel: segmenting and coalescing",
        &["skb_segment", "udp_gso", "gso_segment", "gro_receive", "gro_complete"],
    ),
    (
        "kernel: UDP and IP, to the socket",
        &["net_rx_action", "__netif_receive_skb", "udp_recvmsg", "udpv6_recvmsg"],
    ),
    (
        "kernel: UDP and IP, from the socket",
        &["udp_sendmsg", "udpv6_sendmsg", "ip_send_skb", "ip_output"],
    ),
    ("kernel: system call, message headers", &["do_syscall_64", "entry_SYSCALL", "syscall_return"]),
];

pub(super) const PAGE_FAULTS: &str = "page faults";
const WAKES: &str = "locks, sleeping and waking";

/// The group that it is counted in.
pub(super) fn group(sample: &Sample, owners: &Owners) -> String {
    let Some(first) = sample.chain.first() else { return "rest".to_owned() };
    if first.is_kernel() { kernel(&sample.chain).to_owned() } else { user(first, owners) }
}

fn kernel(chain: &[Frame]) -> &'static str {
    let kernel = || chain.iter().take_while(|frame| frame.is_kernel());
    let calls =
        |names: &[&str]| kernel().any(|frame| names.iter().any(|name| frame.symbol.contains(name)));
    if calls(&["asm_exc_page_fault"]) {
        return PAGE_FAULTS;
    }
    if COPIES.iter().any(|name| chain[0].symbol.starts_with(name)) {
        return "kernel: copy";
    }
    let group = KERNEL.iter().find(|(_, names)| calls(names));
    group.map_or("kernel: rest", |&(group, _)| group)
}

fn user(frame: &Frame, owners: &Owners) -> String {
    let has = |parts: &[&str]| parts.iter().any(|part| frame.symbol.contains(part));
    if has(&["memmove", "memcpy"]) {
        return "memory copy".to_owned();
    }
    if has(&["crc32fast"]) {
        return "ICRC".to_owned();
    }
    if let Some(owner) = owners.get(&frame.address) {
        return match owner.as_str() {
            "ICRC" => owner.clone(),
            owner => format!("ours: {owner}"),
        };
    }
    if has(&["clock_gettime", "time::Timespec", "time::Instant"]) {
        "clock"
    } else if has(&["mutex", "futex", "cond"]) {
        WAKES
    } else if has(&["mmsg", "asynccancel", "syscall", "ppoll", "__libc_"]) {
        "system call, the library's side"
    } else {
        "rest"
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(symbols: &[&str], object: &str) -> Vec<Frame> {
        let frame = |&symbol: &&str| Frame {
            address: 0x10,
            symbol: symbol.to_owned(),
            object: object.to_owned(),
        };
        symbols.iter().map(frame).collect()
    }

    #[test]
    fn the_kernels_groups_are_by_who_called() {
        for (symbols, expected) in [
            (&["_copy_to_iter", "udp_recvmsg", "do_syscall_64"][..], "kernel: copy"),
            (&["_copy_to_iter.x", "asm_exc_page_fault"], "page faults"),
            (&["_raw_spin_lock", "try_to_wake_up", "udp_sendmsg"], WAKES),
            (&["__udp4_lib_lookup", "net_rx_action", "udp_sendmsg"], "kernel: socket lookup"),
            (&["udp_rcv", "net_rx_action", "udp_sendmsg"], "kernel: UDP and IP, to the socket"),
            (&["fib_lookup", "udp_sendmsg"], "kernel: UDP and IP, from the socket"),
            (&["memset", "__alloc_skb", "udp_sendmsg"], "kernel: buffers"),
            (&["fdget", "do_syscall_64"], "kernel: system call, message headers"),
            (&["something"], "kernel: rest"),
        ] {
            let chain = frames(symbols, "[kernel.kallsyms]");
            assert_eq!(kernel(&chain), expected, "{symbols:?}");
        }
        // What user code called the kernel is not asked.
        let mut chain = frames(&["something"], "[kernel.kallsyms]");
        chain.extend(frames(&["futex_caller"], "/bin/x"));
        assert_eq!(kernel(&chain), "kernel: rest");
    }

    #[test]
    fn user_code_is_grouped_by_owner_and_symbol() {
        let owned = Owners::from([(0x10, "roce".to_owned())]);
        for (symbol, owners, expected) in [
            ("__memmove_avx512_unaligned_erms", &owned, "memory copy"),
            ("crc32fast::specialized::calculate", &owned, "ICRC"),
            ("whatever", &owned, "ours: roce"),
            ("__vdso_clock_gettime", &Owners::new(), "clock"),
            ("__recvmmsg", &Owners::new(), "system call, the library's side"),
            ("___pthread_mutex_lock", &Owners::new(), WAKES),
            ("whatever", &Owners::new(), "rest"),
        ] {
            let sample = Sample { thread: String::new(), chain: frames(&[symbol], "/bin/x") };
            assert_eq!(group(&sample, owners), expected, "{symbol}");
        }
    }
}
