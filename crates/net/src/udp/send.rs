//! Sending many datagrams, each gathered from where it lies, with one system call.

use std::io::{self, IoSlice};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::ptr;
use std::slice;
use std::time::Duration;

use millstream_roce::{Instant, MAX_SCATTER_GATHER, Node, Transmit};
use millstream_wire::ICRC_LENGTH;
use socket2::{MsgHdr, SockAddr};

use super::control::ControlBuffer;
use super::group::group;
use super::socket::UdpSocket;
use crate::DriverCounters;

/// How long to wait for room in the send buffer before the datagrams are given up. It empties at
/// the speed of the interface, so only one that stands still takes this long.
const PATIENCE: Duration = Duration::from_millis(100);

/// Headers, pieces, and the trailer.
const MAX_IOVECS: usize = MAX_SCATTER_GATHER + 2;

/// Datagrams to send, and the room to describe them to the kernel. Filled by
/// [`SendBatch::collect`], emptied by [`UdpSocket::send`].
pub struct SendBatch {
    datagrams: Box<[Datagram]>,
    count: usize,
    messages: Vec<Message>,
    /// Point into `datagrams` and at payload, in the order of `messages`.
    iovecs: Vec<libc::iovec>,
    /// Point into `messages` and `iovecs`.
    headers: Vec<libc::mmsghdr>,
}

struct Datagram {
    transmit: Transmit,
    payload: [libc::iovec; MAX_SCATTER_GATHER],
    payload_count: usize,
    /// Padding and ICRC.
    trailer: [u8; 3 + ICRC_LENGTH],
    trailer_length: usize,
    length: usize,
}

/// One message to the kernel: one datagram, or several that it makes by segmentation.
struct Message {
    datagrams: Range<usize>,
    iovecs: Range<usize>,
    destination: SockAddr,
    control: ControlBuffer,
    control_length: usize,
}

impl SendBatch {
    /// Room for this many datagrams.
    pub fn new(datagrams: usize) -> Self {
        let datagram = || Datagram {
            transmit: Transmit::new(),
            payload: [NOTHING; MAX_SCATTER_GATHER],
            payload_count: 0,
            trailer: [0; 3 + ICRC_LENGTH],
            trailer_length: 0,
            length: 0,
        };
        Self {
            datagrams: (0..datagrams).map(|_| datagram()).collect(),
            count: 0,
            messages: Vec::with_capacity(datagrams),
            iovecs: Vec::with_capacity(datagrams * MAX_IOVECS),
            headers: Vec::with_capacity(datagrams),
        }
    }

    /// Takes what `node` has to send, until there is no more or the batch is full: then, and only
    /// then, the result is `true`.
    ///
    /// # Safety
    /// The bytes that `node` names ([`Node::bytes`]) must stay where they are, mapped and readable,
    /// until [`UdpSocket::send`] has returned or the batch is dropped. They may change, as memory
    /// that is shared with a device may; what arrives is then unspecified.
    pub unsafe fn collect<N: Node>(
        &mut self,
        node: &mut N,
        now: Instant,
        counters: &mut DriverCounters,
    ) -> bool {
        while let Some(datagram) = self.datagrams.get_mut(self.count) {
            if !node.poll_transmit(now, &mut datagram.transmit) {
                return false;
            }
            if datagram.resolve(node) {
                self.count += 1;
            } else {
                counters.withdrawn_datagrams += 1;
            }
        }
        true
    }

    /// Whether there is nothing to send.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Describes these datagrams to the kernel, grouped into messages if it can segment them, and
    /// computes their ICRCs.
    fn plan(&mut self, datagrams: Range<usize>, segmentation: bool, source: IpAddr, port: u16) {
        self.messages.clear();
        self.iovecs.clear();
        self.headers.clear();
        let mut rest = datagrams.start;
        while rest < datagrams.end {
            let waiting = self.datagrams[rest..datagrams.end].iter();
            let count = if segmentation {
                group(waiting.map(|datagram| (datagram.transmit.destination, datagram.length)))
            } else {
                1
            };
            let first_iovec = self.iovecs.len();
            let group = &mut self.datagrams[rest..rest + count];
            for (index, datagram) in group.iter_mut().enumerate() {
                // The kernel will number the segments so.
                datagram.seal(source, port, index as u16);
                datagram.gather(&mut self.iovecs);
            }
            let mut control = ControlBuffer::new();
            let control_length =
                // A group of more than one fits a message, so its datagrams fit 16 bits.
                if count > 1 { control.set_segment(group[0].length as u16) } else { 0 };
            self.messages.push(Message {
                datagrams: rest..rest + count,
                iovecs: first_iovec..self.iovecs.len(),
                destination: SocketAddr::new(group[0].transmit.destination, port).into(),
                control,
                control_length,
            });
            rest += count;
        }
        // Nothing moves any more: now take the addresses.
        for message in &mut self.messages {
            let iovecs = &mut self.iovecs[message.iovecs.clone()];
            // SAFETY: plain old data, of which zeros are a valid value.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            header.msg_hdr.msg_name = message.destination.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = message.destination.len();
            header.msg_hdr.msg_iov = iovecs.as_mut_ptr();
            header.msg_hdr.msg_iovlen = iovecs.len() as _;
            if message.control_length > 0 {
                header.msg_hdr.msg_control = message.control.as_mut_ptr();
                header.msg_hdr.msg_controllen = message.control_length as _;
            }
            self.headers.push(header);
        }
    }
}

const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

impl Datagram {
    /// Finds the payload; `false` when its memory has gone.
    fn resolve<N: Node>(&mut self, node: &N) -> bool {
        self.payload_count = 0;
        for piece in self.transmit.payload() {
            let Some(bytes) = node.bytes(piece) else { return false };
            if bytes.len() != piece.length as usize {
                return false;
            }
            self.payload[self.payload_count] = iovec(bytes);
            self.payload_count += 1;
        }
        self.length = self.transmit.datagram_length();
        true
    }

    /// Writes padding and ICRC.
    fn seal(&mut self, source: IpAddr, source_port: u16, identification: u16) {
        let pieces = self.payload[..self.payload_count].iter().map(|piece| {
            // SAFETY: `resolve` made it of a slice, which the caller of `SendBatch::collect`
            // promised to keep.
            unsafe { slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) }
        });
        let icrc = self.transmit.icrc(source, source_port, identification, pieces);
        let padding = self.transmit.padding();
        self.trailer_length = padding.len() + icrc.len();
        self.trailer[..padding.len()].copy_from_slice(padding);
        self.trailer[padding.len()..self.trailer_length].copy_from_slice(&icrc);
    }

    fn gather(&self, iovecs: &mut Vec<libc::iovec>) {
        iovecs.push(iovec(self.transmit.headers()));
        iovecs.extend_from_slice(&self.payload[..self.payload_count]);
        iovecs.push(iovec(&self.trailer[..self.trailer_length]));
    }
}

/// The kernel only reads through the iovecs of a sent message.
const fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

impl UdpSocket {
    /// Sends what `batch` holds and empties it. A datagram that the kernel refuses is dropped and
    /// counted, like one lost on the way. The errors returned are the socket's end.
    pub fn send(&self, batch: &mut SendBatch, counters: &mut DriverCounters) -> io::Result<()> {
        let (source, port) = (self.address(), self.port());
        let end = mem::take(&mut batch.count);
        let mut rest = 0;
        while rest < end {
            batch.plan(rest..end, self.segmentation(), source, port);
            let Some(refused) = self.submit(batch, counters)? else { break };
            // One at a time, the datagrams have identification 0, hence other ICRCs.
            batch.plan(refused.clone(), false, source, port);
            let sent_before = counters.sent_datagrams;
            self.submit(batch, counters)?;
            counters.segmentation_refusals += 1;
            if counters.sent_datagrams - sent_before == refused.len() as u64 {
                // Nothing was wrong with the datagrams.
                self.give_up_segmentation();
                tracing::warn!(address = %source, "the kernel refuses to segment: going on without");
            }
            rest = refused.end;
        }
        Ok(())
    }

    /// Sends one message now, as datagrams of `segment` bytes if it is longer than that.
    pub(crate) fn send_message(
        &self,
        to: &SockAddr,
        pieces: &[IoSlice<'_>],
        segment: usize,
    ) -> io::Result<()> {
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut control = ControlBuffer::new();
        let mut message = MsgHdr::new().with_addr(to).with_buffers(pieces);
        if let Some(segment) = u16::try_from(segment).ok().filter(|_| segment < length) {
            let control_length = control.set_segment(segment);
            message = message.with_control(&control.bytes()[..control_length]);
        }
        self.socket().sendmsg(&message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)?;
        Ok(())
    }

    /// Gives the planned messages to the kernel. It stops at a message that the kernel refuses to
    /// segment, and returns its datagrams.
    fn submit(
        &self,
        batch: &mut SendBatch,
        counters: &mut DriverCounters,
    ) -> io::Result<Option<Range<usize>>> {
        let mut next = 0;
        while next < batch.messages.len() {
            let headers = &mut batch.headers[next..];
            counters.send_calls += 1;
            // SAFETY: the headers point at messages and iovecs of `batch`, which is borrowed, and
            // those at datagrams of it and at payload that the caller of `SendBatch::collect`
            // promised to keep. The kernel writes only `msg_len` of each header.
            let sent = unsafe {
                libc::sendmmsg(
                    self.raw(),
                    headers.as_mut_ptr(),
                    headers.len() as libc::c_uint,
                    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                )
            };
            if let Ok(sent) = usize::try_from(sent) {
                for message in &batch.messages[next..next + sent] {
                    counters.sent_messages += 1;
                    counters.sent_datagrams += message.datagrams.len() as u64;
                    counters.sent_bytes += batch.iovecs[message.iovecs.clone()]
                        .iter()
                        .map(|iovec| iovec.iov_len as u64)
                        .sum::<u64>();
                }
                next += sent;
                continue;
            }
            let error = io::Error::last_os_error();
            let refused = &batch.messages[next];
            let datagrams = refused.datagrams.len() as u64;
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => {
                    counters.send_waits += 1;
                    if !self.wait_writable(PATIENCE)? {
                        let rest = &batch.messages[next..];
                        counters.unsent_datagrams +=
                            rest.iter().map(|message| message.datagrams.len() as u64).sum::<u64>();
                        return Ok(None);
                    }
                }
                Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE | libc::EOPNOTSUPP)
                    if datagrams > 1 =>
                {
                    return Ok(Some(refused.datagrams.clone()));
                }
                Some(libc::EMSGSIZE) => {
                    if counters.too_long_datagrams == 0 {
                        let length = batch.datagrams[refused.datagrams.start].length;
                        let destination = refused.destination.as_socket().map(|to| to.ip());
                        tracing::warn!(
                            length,
                            ?destination,
                            "a datagram exceeds the MTU of its path: use a smaller path MTU"
                        );
                    }
                    counters.too_long_datagrams += 1;
                    next += 1;
                }
                Some(libc::EBADF | libc::ENOTSOCK | libc::ENOSYS) => return Err(error),
                // No route, no buffers, no permission, an ICMP error of an earlier datagram, ...
                _ => {
                    counters.unsent_datagrams += datagrams;
                    next += 1;
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use millstream_roce::{DatagramMeta, Piece, ScatterGather};
    use millstream_wire::ROCE_PORT;
    use millstream_wire::icrc::{self, Addresses, Addressing};

    use super::*;
    use crate::udp::{ReceiveBatch, SocketConfig};

    /// Sends so many datagrams of 100 bytes of payload; of every third, the memory has gone.
    struct Sender {
        destination: IpAddr,
        left: u64,
    }

    static PAYLOAD: [u8; 100] = [0x5a; 100];

    impl Node for Sender {
        fn handle_datagram(&mut self, _now: Instant, _meta: &DatagramMeta, _datagram: &[u8]) {}

        fn handle_timeout(&mut self, _now: Instant) {}

        fn poll_timeout(&mut self) -> Option<Instant> {
            None
        }

        fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
            if self.left == 0 {
                return false;
            }
            self.left -= 1;
            let piece = Piece { key: 0, address: self.left % 3, length: 100 };
            transmit.set(self.destination, &[0; 12], ScatterGather::one(piece), 0);
            true
        }

        fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
            (piece.address > 0).then_some(&PAYLOAD)
        }
    }

    fn open(port: u16, segmentation_offload: bool) -> UdpSocket {
        UdpSocket::open(&SocketConfig {
            address: Ipv4Addr::LOCALHOST.into(),
            port,
            segmentation_offload,
            buffer_length: 1 << 20,
        })
        .unwrap()
    }

    /// Sends 100 datagrams from a socket to itself; returns the identification of each that came,
    /// found by its ICRC.
    fn send_to_itself(socket: &UdpSocket, counters: &mut DriverCounters) -> Vec<u16> {
        let local = socket.info();
        let mut node = Sender { destination: local.address, left: 150 };
        let mut batch = SendBatch::new(128);
        // SAFETY: all bytes are static.
        assert!(!unsafe { batch.collect(&mut node, Instant::ZERO, counters) });
        socket.send(&mut batch, counters).unwrap();
        assert!(batch.is_empty());
        let mut identifications = Vec::new();
        let mut incoming = ReceiveBatch::new(8);
        while socket.receive(&mut incoming, counters).unwrap() > 0 {
            for (meta, datagram) in incoming.datagrams() {
                assert_eq!((meta.source, meta.source_port), (local.address, local.port));
                assert_eq!(datagram[12..112], PAYLOAD);
                let icrc = |identification| {
                    let (source, destination) = (meta.source, meta.destination);
                    let addresses =
                        Addresses::unfragmented(source, destination, identification).unwrap();
                    let source_port = meta.source_port;
                    let destination_port = ROCE_PORT;
                    let addressing = Addressing { addresses, source_port, destination_port };
                    icrc::of_datagram(&addressing, datagram).to_le_bytes()
                };
                let right = (0..64).find(|&guess| icrc(guess) == datagram[112..]);
                identifications.push(right.expect("an identification below 64"));
            }
        }
        identifications
    }

    #[test]
    fn identifications_are_positions_in_the_message() {
        let socket = open(0, true);
        let mut counters = DriverCounters::default();
        let identifications = send_to_itself(&socket, &mut counters);
        assert_eq!(counters.withdrawn_datagrams, 50);
        if socket.segmentation() {
            assert_eq!(identifications, (0..64).chain(0..36).collect::<Vec<_>>());
            assert_eq!((counters.send_calls, counters.sent_messages), (1, 2));
        } else {
            assert_eq!(identifications, [0; 100]);
        }
        assert_eq!((counters.sent_datagrams, counters.sent_bytes), (100, 100 * 116));
    }

    #[test]
    fn a_kernel_that_refuses_to_segment_gets_single_datagrams() {
        let socket = open(0, true);
        if !socket.segmentation() {
            return;
        }
        // Segments need checksums of their own, so the kernel refuses to make any without.
        socket.set_no_checksum();
        let mut counters = DriverCounters::default();
        for calls in [3, 4] {
            // The first message refused, then sent singly, then the rest; the second time, all
            // singly at once.
            assert_eq!(send_to_itself(&socket, &mut counters), [0; 100]);
            assert_eq!((counters.send_calls, counters.segmentation_refusals), (calls, 1));
            assert!(!socket.segmentation());
        }
        assert_eq!((counters.sent_datagrams, counters.sent_messages), (200, 200));
        assert_eq!(counters.unsent_datagrams, 0);
    }

    #[test]
    fn families_do_not_mix() {
        let socket = open(0, true);
        let mut node = Sender { destination: std::net::Ipv6Addr::LOCALHOST.into(), left: 30 };
        let mut batch = SendBatch::new(100);
        let mut counters = DriverCounters::default();
        // SAFETY: all bytes are static.
        assert!(!unsafe { batch.collect(&mut node, Instant::ZERO, &mut counters) });
        socket.send(&mut batch, &mut counters).unwrap();
        assert_eq!((counters.sent_datagrams, counters.unsent_datagrams), (0, 20));
    }

    #[test]
    fn a_full_batch_leaves_the_rest_for_later() {
        let mut node = Sender { destination: Ipv4Addr::LOCALHOST.into(), left: 30 };
        let mut batch = SendBatch::new(15);
        let mut counters = DriverCounters::default();
        // SAFETY: all bytes are static.
        let full = unsafe { batch.collect(&mut node, Instant::ZERO, &mut counters) };
        assert!(full && !batch.is_empty());
        // Of 22, 7 had no memory.
        assert_eq!((node.left, counters.withdrawn_datagrams), (8, 7));
    }
}
