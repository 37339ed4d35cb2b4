//! What drivers did for what passed: system calls, messages of the kernel, datagrams.

use millstream_verbs::Device;
use serde::{Deserialize, Serialize};

use crate::bench::figures::per;

/// What the drivers of some devices have done so far.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Work {
    send_calls: u64,
    receive_calls: u64,
    sleeps: u64,
    wakes: u64,
    sent_messages: u64,
    sent_datagrams: u64,
    received_messages: u64,
    received_datagrams: u64,
    retransmissions: u64,
}

/// In parts of what passed. A packet is a datagram that was sent, by either side.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Counted {
    /// All of those below.
    pub(super) system_calls_per_packet: f64,
    send_calls_per_packet: f64,
    receive_calls_per_packet: f64,
    /// `ppoll`.
    sleeps_per_packet: f64,
    /// Two for each time that a thread wakes another one: a write and a read of an eventfd.
    wake_calls_per_packet: f64,
    /// 1 without segmentation offload.
    pub(super) sent_messages_per_packet: f64,
    /// Messages received for each datagram received: 1 where the kernel coalesces nothing.
    pub(super) received_messages_per_packet: f64,
    pub(super) packets_per_gb: f64,
}

impl Work {
    /// Of all of them.
    pub(super) fn of<'a>(devices: impl Iterator<Item = &'a Device>) -> Self {
        devices.fold(Self::default(), |sum, device| {
            let driver = device.driver_counters();
            sum.plus(Self {
                send_calls: driver.send_calls,
                receive_calls: driver.receive_calls,
                sleeps: driver.sleeps,
                wakes: driver.wakes,
                sent_messages: driver.sent_messages,
                sent_datagrams: driver.sent_datagrams,
                received_messages: driver.received_messages,
                received_datagrams: driver.received_datagrams,
                retransmissions: device.counters().retransmissions,
            })
        })
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self {
            send_calls: self.send_calls + other.send_calls,
            receive_calls: self.receive_calls + other.receive_calls,
            sleeps: self.sleeps + other.sleeps,
            wakes: self.wakes + other.wakes,
            sent_messages: self.sent_messages + other.sent_messages,
            sent_datagrams: self.sent_datagrams + other.sent_datagrams,
            received_messages: self.received_messages + other.received_messages,
            received_datagrams: self.received_datagrams + other.received_datagrams,
            retransmissions: self.retransmissions + other.retransmissions,
        }
    }

    /// What was done after `earlier`.
    pub(super) const fn since(self, earlier: Self) -> Self {
        Self {
            send_calls: self.send_calls - earlier.send_calls,
            receive_calls: self.receive_calls - earlier.receive_calls,
            sleeps: self.sleeps - earlier.sleeps,
            wakes: self.wakes - earlier.wakes,
            sent_messages: self.sent_messages - earlier.sent_messages,
            sent_datagrams: self.sent_datagrams - earlier.sent_datagrams,
            received_messages: self.received_messages - earlier.received_messages,
            received_datagrams: self.received_datagrams - earlier.received_datagrams,
            retransmissions: self.retransmissions - earlier.retransmissions,
        }
    }

    pub(super) const fn retransmissions(&self) -> u64 {
        self.retransmissions
    }

    /// In parts of `bytes` that passed.
    pub(super) fn counted(&self, bytes: u64) -> Counted {
        let per_packet = |count: u64| per(count as f64, self.sent_datagrams as f64);
        let wake_calls = 2 * self.wakes;
        let calls = self.send_calls + self.receive_calls + self.sleeps + wake_calls;
        Counted {
            system_calls_per_packet: per_packet(calls),
            send_calls_per_packet: per_packet(self.send_calls),
            receive_calls_per_packet: per_packet(self.receive_calls),
            sleeps_per_packet: per_packet(self.sleeps),
            wake_calls_per_packet: per_packet(wake_calls),
            sent_messages_per_packet: per_packet(self.sent_messages),
            received_messages_per_packet: per(
                self.received_messages as f64,
                self.received_datagrams as f64,
            ),
            packets_per_gb: per(self.sent_datagrams as f64, bytes as f64 / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_for_each_packet() {
        let before = Work { send_calls: 7, sleeps: 3, sent_datagrams: 100, ..Work::default() };
        let after = Work {
            send_calls: 7 + 20,
            receive_calls: 30,
            sleeps: 3 + 4,
            wakes: 3,
            sent_messages: 50,
            sent_datagrams: 100 + 200,
            received_messages: 40,
            received_datagrams: 160,
            retransmissions: 9,
        };
        let work = after.since(before);
        let work = Work { wakes: 1, ..Work::default() }.plus(Work { wakes: 2, ..work });
        assert_eq!(work.retransmissions(), 9);
        let counted = work.counted(500_000_000);
        let is = |figure: f64, expected: f64| {
            assert!((figure - expected).abs() < 1e-12, "{figure} is not {expected}: {counted:?}");
        };
        is(counted.send_calls_per_packet, 0.1);
        is(counted.receive_calls_per_packet, 0.15);
        is(counted.sleeps_per_packet, 0.02);
        is(counted.wake_calls_per_packet, 0.03);
        is(counted.system_calls_per_packet, 0.3);
        is(counted.sent_messages_per_packet, 0.25);
        is(counted.received_messages_per_packet, 0.25);
        is(counted.packets_per_gb, 400.0);
    }
}
