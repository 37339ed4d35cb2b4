//! Sending many datagrams, each gathered from where it lies, with one system call.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use millstream_roce::{Instant, Node};

use super::datagram::{Datagram, Datagrams, iovec};
use super::group::group;
use crate::DriverCounters;
use crate::socket::{Bound, wait};

/// How long to wait for room in the send buffer before the datagrams are given up. It empties at
/// the speed of the interface, so only one that stands still takes this long.
const PATIENCE: Duration = Duration::from_millis(100);

/// The kernel takes 1024 for one message (UIO_MAXIOV), of which one is for what precedes datagrams.
const MOST_IOVECS: usize = 1023;

/// A socket that sends batches.
pub(crate) trait Sender: AsFd {
    /// What each message has beside its datagrams.
    type Head: Head;

    /// What it is bound to.
    fn bound(&self) -> &Bound;

    /// What a message of `count` datagrams to `destination` needs, of which all but the last have
    /// `segment` bytes, and all together `length`.
    fn head(
        &self,
        destination: IpAddr,
        count: usize,
        segment: usize,
        length: usize,
    ) -> Result<Self::Head, Refusal>;
}

/// Why a message cannot be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Refusal {
    /// Nobody knows the way to its destination yet, or there is none.
    Unresolved,
    /// Its datagrams exceed the MTU.
    TooLong,
}

/// What a message has beside its datagrams. It stays in place while pointers into it are in use.
pub(crate) trait Head {
    /// Bytes that precede the datagrams.
    fn bytes(&self) -> &[u8];

    /// Sets the address and the control message.
    fn describe(&mut self, header: &mut libc::msghdr);
}

/// Datagrams to send, and the room to describe them to the kernel. Filled by
/// [`SendBatch::collect`], emptied by [`SendBatch::send`].
pub(crate) struct SendBatch<H> {
    datagrams: Datagrams,
    messages: Vec<Message<H>>,
    /// Point into `messages`, into `datagrams` and at payload, in the order of `messages`.
    iovecs: Vec<libc::iovec>,
    /// Point into `messages` and `iovecs`.
    headers: Vec<libc::mmsghdr>,
}

/// One message to the kernel: one datagram, or several that it makes by segmentation.
struct Message<H> {
    datagrams: Range<usize>,
    /// The first is for the head's bytes.
    iovecs: Range<usize>,
    head: H,
}

impl<H: Head> SendBatch<H> {
    /// Room for this many datagrams.
    pub(crate) fn new(datagrams: usize) -> Self {
        Self {
            datagrams: Datagrams::new(datagrams),
            messages: Vec::with_capacity(datagrams),
            iovecs: Vec::with_capacity(datagrams * (1 + Datagrams::MAX_IOVECS)),
            headers: Vec::with_capacity(datagrams),
        }
    }

    /// Takes what `node` has to send, until there is no more or the batch is full: then, and only
    /// then, the result is `true`.
    ///
    /// # Safety
    /// The bytes that `node` names ([`Node::bytes`]) must stay where they are, mapped and readable,
    /// until [`SendBatch::send`] has returned or the batch is dropped. They may change, as memory
    /// that is shared with a device may; what arrives is then unspecified.
    pub(crate) unsafe fn collect<N: Node>(
        &mut self,
        node: &mut N,
        now: Instant,
        counters: &mut DriverCounters,
    ) -> bool {
        self.datagrams.collect(node, now, counters)
    }

    /// Whether there is nothing to send.
    pub(crate) const fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// Sends what it holds over `socket`, and is empty then. A datagram that the kernel refuses is
    /// dropped and counted, like one lost on the way. The errors returned are the socket's end.
    pub(crate) fn send<S: Sender<Head = H>>(
        &mut self,
        socket: &S,
        counters: &mut DriverCounters,
    ) -> io::Result<()> {
        let sent = self.send_all(socket, counters);
        self.datagrams.clear();
        sent
    }

    fn send_all<S: Sender<Head = H>>(
        &mut self,
        socket: &S,
        counters: &mut DriverCounters,
    ) -> io::Result<()> {
        let end = self.datagrams.list().len();
        let mut rest = 0;
        while rest < end {
            self.plan(rest..end, socket, socket.bound().segments(), counters);
            let Some(refused) = self.submit(socket, counters)? else { break };
            // One at a time, the datagrams have identification 0, hence other ICRCs.
            self.plan(refused.clone(), socket, false, counters);
            let sent_before = counters.sent_datagrams;
            self.submit(socket, counters)?;
            counters.segmentation_refusals += 1;
            if counters.sent_datagrams - sent_before == refused.len() as u64 {
                // Nothing was wrong with the datagrams.
                socket.bound().stop_segmenting();
                let address = socket.bound().address();
                tracing::warn!(%address, "the kernel refuses to segment: going on without");
            }
            rest = refused.end;
        }
        Ok(())
    }

    /// Describes these datagrams to the kernel, grouped into messages if it can segment them, and
    /// computes their ICRCs. What cannot be sent is left out, and counted.
    fn plan<S: Sender<Head = H>>(
        &mut self,
        datagrams: Range<usize>,
        socket: &S,
        segmentation: bool,
        counters: &mut DriverCounters,
    ) {
        self.messages.clear();
        self.iovecs.clear();
        self.headers.clear();
        let (source, port) = (socket.bound().address(), socket.bound().port());
        let mut rest = datagrams.start;
        while rest < datagrams.end {
            let waiting = &self.datagrams.list()[rest..datagrams.end];
            let count = if segmentation {
                // Whoever has the destination may divide what arrives among processes, by slot.
                let of = |room: &mut usize, datagram: &Datagram| {
                    *room = room.checked_sub(datagram.iovecs())?;
                    Some(((datagram.destination, datagram.slot), datagram.length as usize))
                };
                group(waiting.iter().scan(MOST_IOVECS, of))
            } else {
                1
            };
            let message = rest..rest + count;
            rest += count;
            let (destination, segment) = (waiting[0].destination, waiting[0].length as usize);
            let length = bytes_of(&waiting[..count]);
            let head = match socket.head(destination, count, segment, length) {
                Ok(head) => head,
                Err(Refusal::Unresolved) => {
                    counters.unresolved_datagrams += count as u64;
                    continue;
                }
                Err(Refusal::TooLong) => {
                    // The first is the longest: another one may fit.
                    too_long(counters, segment, destination);
                    rest = message.start + 1;
                    continue;
                }
            };
            for (segment, index) in message.clone().enumerate() {
                // The kernel will number the segments so.
                self.datagrams.seal(index, source, port, segment as u16);
            }
            self.messages.push(Message { datagrams: message, iovecs: 0..0, head });
        }
        // Nothing is written any more: now take the addresses, first those of the datagrams.
        for message in &mut self.messages {
            let first = self.iovecs.len();
            self.iovecs.push(iovec(&[]));
            for index in message.datagrams.clone() {
                self.datagrams.gather(index, &mut self.iovecs);
            }
            message.iovecs = first..self.iovecs.len();
        }
        for message in &mut self.messages {
            // SAFETY: plain old data, of which zeros are a valid value.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            message.head.describe(&mut header.msg_hdr);
            let head = message.head.bytes();
            let iovecs = &mut self.iovecs[message.iovecs.clone()];
            iovecs[0] = iovec(head);
            // Drivers without one do not make the kernel look at an empty piece.
            let iovecs = if head.is_empty() { &mut iovecs[1..] } else { iovecs };
            header.msg_hdr.msg_iov = iovecs.as_mut_ptr();
            header.msg_hdr.msg_iovlen = iovecs.len() as _;
            self.headers.push(header);
        }
    }

    /// Gives the planned messages to the kernel. It stops at a message that the kernel refuses to
    /// segment, and returns its datagrams.
    fn submit<S: Sender<Head = H>>(
        &mut self,
        socket: &S,
        counters: &mut DriverCounters,
    ) -> io::Result<Option<Range<usize>>> {
        let mut next = 0;
        while next < self.messages.len() {
            let headers = &mut self.headers[next..];
            counters.send_calls += 1;
            // SAFETY: the headers point at messages and iovecs of this batch, which is borrowed,
            // and those at heads and datagrams of it and at payload that the caller of `collect`
            // promised to keep. The kernel writes only `msg_len` of each header.
            let sent = unsafe {
                libc::sendmmsg(
                    socket.as_fd().as_raw_fd(),
                    headers.as_mut_ptr(),
                    headers.len() as libc::c_uint,
                    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                )
            };
            if let Ok(sent) = usize::try_from(sent) {
                for message in &self.messages[next..next + sent] {
                    counters.sent_messages += 1;
                    let datagrams = &self.datagrams.list()[message.datagrams.clone()];
                    counters.sent_datagrams += datagrams.len() as u64;
                    counters.sent_bytes += bytes_of(datagrams) as u64;
                }
                next += sent;
                continue;
            }
            let error = io::Error::last_os_error();
            let refused = &self.messages[next];
            let datagrams = refused.datagrams.len() as u64;
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => {
                    counters.send_waits += 1;
                    if !wait(socket.as_fd(), libc::POLLOUT, PATIENCE)? {
                        let rest = &self.messages[next..];
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
                    let datagram = &self.datagrams.list()[refused.datagrams.start];
                    too_long(counters, datagram.length as usize, datagram.destination);
                    next += 1;
                }
                Some(libc::EBADF | libc::ENOTSOCK | libc::ENOSYS) => return Err(error),
                // No route, no buffers, no permission, an interface that is down, an ICMP error of
                // an earlier datagram, ...
                _ => {
                    counters.unsent_datagrams += datagrams;
                    next += 1;
                }
            }
        }
        Ok(None)
    }
}

/// Bytes of these datagrams.
fn bytes_of(datagrams: &[Datagram]) -> usize {
    datagrams.iter().map(|datagram| datagram.length as usize).sum()
}

fn too_long(counters: &mut DriverCounters, length: usize, destination: IpAddr) {
    if counters.too_long_datagrams == 0 {
        tracing::warn!(
            length,
            %destination,
            "a datagram exceeds the MTU of its path: use a smaller path MTU"
        );
    }
    counters.too_long_datagrams += 1;
}
