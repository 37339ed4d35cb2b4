//! Connecting queue pairs without a handshake: the simulation knows both ends.

use core::net::IpAddr;

use millstream_roce::{Access, Endpoint, Instant, Memory, QueuePairAttributes, QueuePairState};
use millstream_wire::{Mtu, Psn, Qpn};

/// The rules of a connection; both ends have the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ConnectionOptions {
    /// Payload bytes per packet.
    pub path_mtu: Mtu,
    /// Acknowledgement timeout: 4.096 us * 2^n.
    pub timeout: u8,
    /// Timeouts in a row that a connection survives.
    pub retry_count: u8,
    /// RNR NAKs in a row that it survives; 7 = any number.
    pub rnr_retry: u8,
    /// Code of the time that an RNR NAK asks for.
    pub minimum_rnr_timer: u8,
    /// READs outstanding, and executed, at a time.
    pub reads: u8,
    /// Bytes of SENDs and WRITEs in flight, if there is a limit.
    pub send_window_bytes: Option<u32>,
}

impl ConnectionOptions {
    /// Half a second of silence is survived.
    pub const DEFAULT: Self = Self {
        path_mtu: Mtu::B1024,
        timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        minimum_rnr_timer: 1,
        reads: 4,
        send_window_bytes: None,
    };
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Everything that a peer can do.
pub(crate) const FULL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// The other end, and the numbers that the two agreed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) address: IpAddr,
    pub(crate) qpn: Qpn,
    /// The first number that we send.
    pub(crate) send_psn: Psn,
    /// The first number that it sends.
    pub(crate) receive_psn: Psn,
    /// Bytes that may be in flight to it, if it has said that.
    pub(crate) receive_share: Option<u32>,
}

/// Takes a new queue pair to "ready to send".
///
/// # Panics
/// When the options are out of range.
pub(crate) fn connect<M: Memory>(
    endpoint: &mut Endpoint<M>,
    qpn: Qpn,
    remote: &Remote,
    options: &ConnectionOptions,
) {
    let none = QueuePairAttributes::default();
    let steps = [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(FULL_ACCESS),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(remote.address),
            path_mtu: Some(options.path_mtu),
            destination_qpn: Some(remote.qpn),
            receive_psn: Some(remote.receive_psn),
            responder_resources: Some(options.reads),
            minimum_rnr_timer: Some(options.minimum_rnr_timer),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(remote.send_psn),
            timeout: Some(options.timeout),
            retry_count: Some(options.retry_count),
            rnr_retry: Some(options.rnr_retry),
            initiator_depth: Some(options.reads),
            send_window_bytes: remote.receive_share.or(options.send_window_bytes),
            ..none
        },
    ];
    for attributes in steps {
        endpoint
            .modify_queue_pair(Instant::ZERO, qpn, &attributes)
            .expect("the attributes are those of the transitions, and in range");
    }
}
