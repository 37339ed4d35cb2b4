//! Receiving many frames with one system call.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::ptr;

use millstream_roce::DatagramMeta;
use millstream_wire::ethernet::EthernetHeader;

use super::frame::{self, Datagrams};
use super::offload::{self, Offload};
use super::socket::PacketSocket;
use crate::DriverCounters;
use crate::control::{self, ControlBuffer};
use crate::link::{Incoming, Link, receive_messages};

/// Frames received at once. One may hold 64 KiB, and more of those would leave the cache before they
/// are handled; but one may as well be single.
const FRAMES: usize = 16;

/// The offload's header, and the longest frame: an IP packet of 64 KiB less a byte, and 40 more of
/// IPv6. Rounded up to keep buffers on cache lines.
const BUFFER_LENGTH: usize =
    (offload::LENGTH + EthernetHeader::LENGTH + 40 + (1 << 16)).next_multiple_of(64);

/// Buffers for the frames of one system call, and what it put there.
pub(crate) struct PacketBatch {
    bytes: Box<[u8]>,
    slots: Box<[Slot]>,
    /// What `recvmmsg` fills. The pointers in it are set before each call.
    headers: Box<[libc::mmsghdr]>,
    iovecs: Box<[libc::iovec]>,
    filled: usize,
    /// The last count of frames that the kernel dropped.
    overflowed: u32,
}

/// One frame.
struct Slot {
    control: ControlBuffer,
    /// `None` when it was refused.
    datagrams: Option<Datagrams>,
}

impl PacketBatch {
    fn new() -> Self {
        // SAFETY: plain old data, of which zeros are a valid value; pointers are set before use.
        let header = || unsafe { mem::zeroed() };
        let iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let slot = || Slot { control: ControlBuffer::new(), datagrams: None };
        Self {
            bytes: vec![0; FRAMES * BUFFER_LENGTH].into(),
            slots: (0..FRAMES).map(|_| slot()).collect(),
            headers: (0..FRAMES).map(|_| header()).collect(),
            iovecs: vec![iovec; FRAMES].into(),
            filled: 0,
            overflowed: 0,
        }
    }

    /// Points the headers at the buffers, as the kernel overwrites lengths in them.
    fn arm(&mut self) {
        let buffers = self.bytes.chunks_exact_mut(BUFFER_LENGTH);
        let parts = self.slots.iter_mut().zip(&mut self.iovecs).zip(&mut self.headers).zip(buffers);
        for (((slot, iovec), header), buffer) in parts {
            iovec.iov_base = buffer.as_mut_ptr().cast();
            iovec.iov_len = buffer.len();
            let header = &mut header.msg_hdr;
            header.msg_iov = iovec;
            header.msg_iovlen = 1;
            header.msg_control = slot.control.as_mut_ptr();
            header.msg_controllen = size_of::<ControlBuffer>() as _;
            header.msg_flags = 0;
        }
    }

    /// Takes in what the kernel said of the first `count` frames.
    fn fill(&mut self, count: usize, local: IpAddr, port: u16, counters: &mut DriverCounters) {
        self.filled = count;
        let buffers = self.bytes.chunks_exact(BUFFER_LENGTH);
        for ((slot, header), buffer) in
            self.slots.iter_mut().zip(&self.headers).zip(buffers).take(count)
        {
            // SAFETY: `recvmmsg` just filled this header, whose control buffer is the slot's.
            let received = unsafe { control::read(&header.msg_hdr) };
            if let Some(overflowed) = received.overflowed {
                let more = overflowed.wrapping_sub(mem::replace(&mut self.overflowed, overflowed));
                counters.overflowed_messages += u64::from(more);
            }
            let bytes = &buffer[..header.msg_len as usize];
            if header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
                counters.truncated_messages += 1;
                slot.datagrams = None;
                continue;
            }
            slot.datagrams = read(bytes, local, port);
            match &slot.datagrams {
                Some(datagrams) => {
                    counters.received_messages += 1;
                    counters.received_datagrams += datagrams.count() as u64;
                    counters.received_bytes += datagrams.length as u64;
                }
                None => counters.refused_frames += 1,
            }
        }
    }
}

/// Reads what one message holds: the offload's header and a frame.
fn read(bytes: &[u8], local: IpAddr, port: u16) -> Option<Datagrams> {
    let (offload, frame) = bytes.split_first_chunk::<{ offload::LENGTH }>()?;
    let offload = Offload::parse(offload).ok()?;
    frame::parse(frame, offload, local, port).ok()
}

impl Incoming for PacketBatch {
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])> {
        let slots = self.slots.iter().zip(self.bytes.chunks_exact(BUFFER_LENGTH));
        slots.take(self.filled).flat_map(|(slot, buffer)| {
            let frame = &buffer[offload::LENGTH..];
            slot.datagrams.iter().flat_map(|datagrams| datagrams.of(frame))
        })
    }
}

impl Link for PacketSocket {
    type Incoming = PacketBatch;

    fn incoming(&self) -> PacketBatch {
        PacketBatch::new()
    }

    fn receive(&self, batch: &mut PacketBatch, counters: &mut DriverCounters) -> io::Result<usize> {
        batch.filled = 0;
        batch.arm();
        // SAFETY: all that `arm` pointed the headers at lives in `batch`, which is borrowed
        // exclusively during the call.
        let count = unsafe { receive_messages(self, &mut batch.headers, counters)? };
        batch.fill(count, self.bound().address(), self.bound().port(), counters);
        Ok(count)
    }
}
