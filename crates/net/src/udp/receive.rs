//! Receiving many datagrams with one system call.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use millstream_roce::{DatagramMeta, Identification, slot_of};
use socket2::Socket;

use super::socket::UdpSocket;
use crate::DriverCounters;
use crate::control::{self, ControlBuffer, Received};
use crate::link::{Incoming, Link, receive_messages};
use crate::shared_address::{HandOver, Run};

/// No UDP payload is longer, coalesced or not (65,527 over IPv6).
const MESSAGE_LENGTH: usize = 1 << 16;

/// Messages received at once. More would leave the cache before they are handled. And what they hold is
/// acknowledged when all of it was handled: of a window of 128 packets, 8 messages of 15 are nearly
/// all, and the two ends would take turns.
const MESSAGES: usize = 4;

/// Buffers for the messages of one system call, and what it put there.
pub struct ReceiveBatch {
    bytes: Box<[u8]>,
    slots: Box<[Slot]>,
    /// What `recvmmsg` fills. The pointers in it are set before each call.
    headers: Box<[libc::mmsghdr]>,
    iovecs: Box<[libc::iovec]>,
    filled: usize,
    /// The last count of [`control::Received::overflowed`]. The first one is of the time before, when
    /// the socket may have been another's: nothing overflows a buffer before something has come.
    overflowed: Option<u32>,
}

/// One message.
struct Slot {
    source: libc::sockaddr_storage,
    control: ControlBuffer,
    meta: DatagramMeta,
    /// Where the datagrams begin, and where they end.
    start: usize,
    length: usize,
    segment: usize,
    /// The place of the first in what the kernel coalesced.
    index: u16,
    /// Only those of one slot are ours.
    only: Option<usize>,
}

impl ReceiveBatch {
    /// Room for this many messages of 64 KiB.
    pub fn new(messages: usize) -> Self {
        let unspecified = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let slot = || Slot {
            // SAFETY: plain old data, of which zeros are a valid value.
            source: unsafe { mem::zeroed() },
            control: ControlBuffer::new(),
            meta: DatagramMeta {
                source: unspecified,
                source_port: 0,
                destination: unspecified,
                identification: Identification::Guessed(0),
                congestion_experienced: false,
            },
            start: 0,
            length: 0,
            segment: 0,
            index: 0,
            only: None,
        };
        // SAFETY: as above, null pointers and zero lengths; both are set before use.
        let header = || unsafe { mem::zeroed() };
        let iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Self {
            bytes: vec![0; messages * MESSAGE_LENGTH].into(),
            slots: (0..messages).map(|_| slot()).collect(),
            headers: (0..messages).map(|_| header()).collect(),
            iovecs: vec![iovec; messages].into(),
            filled: 0,
            overflowed: None,
        }
    }

    /// The datagrams received, in order, with what is known of each.
    pub fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])> {
        let messages = self.slots.iter().zip(self.bytes.chunks_exact(MESSAGE_LENGTH));
        messages.take(self.filled).flat_map(|(slot, bytes)| {
            let segments = bytes[slot.start..slot.length].chunks(slot.segment).enumerate();
            let ours =
                segments.filter(|(_, bytes)| slot.only.is_none_or(|it| it == slot_of(bytes)));
            ours.map(|(index, bytes)| {
                // A segmenting sender numbers its segments from 0, and what the kernel coalesced
                // probably was one segmented message.
                let identification = Identification::Guessed(slot.index.wrapping_add(index as u16));
                (DatagramMeta { identification, ..slot.meta }, bytes)
            })
        })
    }

    /// Whether the last call filled all the room, so that more may be waiting.
    pub const fn is_full(&self) -> bool {
        self.filled == self.slots.len()
    }

    /// Points the headers at the buffers, as the kernel overwrites lengths in them.
    fn arm(&mut self) {
        let buffers = self.bytes.chunks_exact_mut(MESSAGE_LENGTH);
        let parts = self.slots.iter_mut().zip(&mut self.iovecs).zip(&mut self.headers).zip(buffers);
        for (((slot, iovec), header), buffer) in parts {
            iovec.iov_base = buffer.as_mut_ptr().cast();
            iovec.iov_len = buffer.len();
            let header = &mut header.msg_hdr;
            header.msg_name = (&raw mut slot.source).cast();
            header.msg_namelen = mem::size_of_val(&slot.source) as libc::socklen_t;
            header.msg_iov = iovec;
            header.msg_iovlen = 1;
            header.msg_control = slot.control.as_mut_ptr();
            header.msg_controllen = size_of::<ControlBuffer>() as _;
            header.msg_flags = 0;
        }
    }

    /// Takes in what the kernel said of the first `count` messages.
    fn fill(&mut self, count: usize, local: IpAddr, counters: &mut DriverCounters) {
        self.filled = count;
        for (slot, header) in self.slots.iter_mut().zip(&self.headers).take(count) {
            // SAFETY: `recvmmsg` just filled this header, whose control buffer is the slot's.
            let Received { segment, congestion_experienced, overflowed } =
                unsafe { control::read(&header.msg_hdr) };
            // Nothing is said of none.
            let before = *self.overflowed.get_or_insert(overflowed.unwrap_or(0));
            if let Some(overflowed) = overflowed {
                self.overflowed = Some(overflowed);
                counters.overflowed_messages += u64::from(overflowed.wrapping_sub(before));
            }
            (slot.start, slot.index, slot.only) = (0, 0, None);
            slot.length = header.msg_len as usize;
            slot.segment = segment.unwrap_or(slot.length).max(1);
            let source = source(&slot.source);
            // Without the control messages, where one datagram ends and the next starts is unknown.
            let truncated = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
            let Some((source, source_port)) = source.filter(|_| !truncated) else {
                counters.truncated_messages += 1;
                slot.length = 0;
                continue;
            };
            slot.meta = DatagramMeta {
                source,
                source_port,
                destination: local,
                identification: Identification::Guessed(0),
                congestion_experienced,
            };
            counters.received_messages += 1;
            counters.received_datagrams += slot.length.div_ceil(slot.segment) as u64;
            counters.received_bytes += slot.length as u64;
        }
    }
}

impl ReceiveBatch {
    /// Takes what others handed over, and hands over what is for them. Without either, it looks at one
    /// byte of each datagram.
    fn sort(&mut self, hand_over: &HandOver, socket: &Socket, counters: &mut DriverCounters) {
        let messages = self.slots.iter_mut().zip(self.bytes.chunks_exact(MESSAGE_LENGTH));
        for (message, bytes) in messages.take(self.filled) {
            let bytes = &bytes[..message.length];
            if let Some(Run { meta, index, segment, bytes }) = hand_over.read(&message.meta, bytes)
            {
                (message.meta, message.index, message.segment) = (meta, index, segment);
                message.start = HandOver::HEADER_LENGTH;
                counters.taken_over_datagrams += bytes.len().div_ceil(segment) as u64;
                continue;
            }
            let segments = || bytes.chunks(message.segment).map(slot_of);
            if segments().all(|slot| slot == hand_over.slot) {
                continue;
            }
            message.only = Some(hand_over.slot);
            let (mut index, mut rest) = (0, bytes);
            // Runs of datagrams for one slot, in their order.
            while let Some(first) = rest.chunks(message.segment).next() {
                let slot = slot_of(first);
                let same = rest.chunks(message.segment).take_while(|it| slot_of(it) == slot);
                let count = same.count();
                let (bytes, later) = rest.split_at((count * message.segment).min(rest.len()));
                if slot != hand_over.slot {
                    let run = Run { meta: message.meta, index, segment: message.segment, bytes };
                    hand_over.send(socket, slot, &run, counters);
                }
                index = index.wrapping_add(count as u16);
                rest = later;
            }
        }
    }
}

impl UdpSocket {
    /// Receives what is there into `batch`, in place of what was in it; returns how many messages.
    /// Errors of the network are counted, not returned: those returned are the socket's end.
    pub fn receive(
        &self,
        batch: &mut ReceiveBatch,
        counters: &mut DriverCounters,
    ) -> io::Result<usize> {
        batch.filled = 0;
        batch.arm();
        // SAFETY: all that `arm` pointed the headers at lives in `batch`, which is borrowed
        // exclusively during the call.
        let count = unsafe { receive_messages(self, &mut batch.headers, counters)? };
        batch.fill(count, self.bound().address(), counters);
        if let Some(hand_over) = self.hand_over() {
            batch.sort(hand_over, self.socket(), counters);
        }
        Ok(count)
    }
}

impl Link for UdpSocket {
    type Incoming = ReceiveBatch;

    fn incoming(&self) -> ReceiveBatch {
        ReceiveBatch::new(MESSAGES)
    }

    fn receive(
        &self,
        batch: &mut ReceiveBatch,
        counters: &mut DriverCounters,
    ) -> io::Result<usize> {
        Self::receive(self, batch, counters)
    }
}

impl Incoming for ReceiveBatch {
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])> {
        Self::datagrams(self)
    }
}

fn source(address: &libc::sockaddr_storage) -> Option<(IpAddr, u16)> {
    let address = ptr::from_ref(address);
    // SAFETY: storage is as long and as aligned as every address that it may hold, all of which are
    // plain old data; which one it is, the family says.
    unsafe {
        match libc::c_int::from((*address).ss_family) {
            libc::AF_INET => {
                let v4 = &*address.cast::<libc::sockaddr_in>();
                let bits = u32::from_be(v4.sin_addr.s_addr);
                Some((Ipv4Addr::from_bits(bits).into(), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 => {
                let v6 = &*address.cast::<libc::sockaddr_in6>();
                let octets = v6.sin6_addr.s6_addr;
                Some((Ipv6Addr::from_octets(octets).into(), u16::from_be(v6.sin6_port)))
            }
            _ => None,
        }
    }
}
