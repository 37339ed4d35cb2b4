//! Control messages: what the kernel says of a message beside its bytes, and we to it.

use std::mem;
use std::ptr;

/// Room for all control messages of one message that is received: three of 24 bytes are the most we
/// ask for.
#[repr(C, align(8))]
pub(crate) struct ControlBuffer<const LENGTH: usize = 128>([u8; LENGTH]);

/// Room for what [`SegmentControl::set_segment`] says of a message that is sent.
pub(crate) type SegmentControl = ControlBuffer<24>;

const _: () = assert!(mem::align_of::<ControlBuffer>() >= mem::align_of::<libc::cmsghdr>());

/// What the kernel said of a received message.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Received {
    /// The length of each datagram in it but the last; `None` when it is one datagram.
    pub(crate) segment: Option<usize>,
    /// The congestion-experienced mark (RFC 3168).
    pub(crate) congestion_experienced: bool,
    /// Messages that the socket had dropped for want of buffer space when this one came.
    pub(crate) overflowed: Option<u32>,
}

impl<const LENGTH: usize> ControlBuffer<LENGTH> {
    pub(crate) const fn new() -> Self {
        Self([0; LENGTH])
    }

    pub(crate) const fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.0.as_mut_ptr().cast()
    }

    pub(crate) const fn bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }
}

impl SegmentControl {
    /// Asks for segments of this many bytes; returns the length of the control messages.
    pub(crate) fn set_segment(&mut self, segment: u16) -> usize {
        const LENGTH: u32 = mem::size_of::<u16>() as u32;
        // SAFETY: CMSG_LEN, CMSG_SPACE and CMSG_DATA only compute. The buffer is aligned for a
        // `cmsghdr` and as long as CMSG_SPACE(2) (24 bytes); all bit patterns are valid for it.
        unsafe {
            let header = self.as_mut_ptr().cast::<libc::cmsghdr>();
            (*header).cmsg_len = libc::CMSG_LEN(LENGTH) as _;
            (*header).cmsg_level = libc::SOL_UDP;
            (*header).cmsg_type = libc::UDP_SEGMENT;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<u16>(), segment);
            libc::CMSG_SPACE(LENGTH) as usize
        }
    }
}

/// Reads the control messages of a received message.
///
/// # Safety
/// `header` must be as `recvmsg` left it, with its control buffer still alive.
pub(crate) unsafe fn read(header: &libc::msghdr) -> Received {
    let mut received = Received::default();
    // SAFETY: the caller's promise is what CMSG_FIRSTHDR and CMSG_NXTHDR need; they return pointers
    // to whole headers within the buffer, or null.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: not null, so a header, see above.
    while let Some(message) = unsafe { next.as_ref() } {
        // SAFETY: the kernel wrote `cmsg_len` bytes from here, within the buffer; the data may be
        // unaligned for its type, hence `read_unaligned`.
        let data = unsafe { libc::CMSG_DATA(message) };
        // SAFETY: CMSG_LEN only computes.
        let length = message.cmsg_len.saturating_sub(unsafe { libc::CMSG_LEN(0) as usize });
        let integer = || {
            (length >= mem::size_of::<libc::c_int>()).then(|| {
                // SAFETY: the length was just checked.
                unsafe { ptr::read_unaligned(data.cast::<libc::c_int>()) }
            })
        };
        match (message.cmsg_level, message.cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                received.segment =
                    integer().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
            }
            // One byte, unlike IPv6's.
            (libc::IPPROTO_IP, libc::IP_TOS) if length >= 1 => {
                // SAFETY: the length was just checked.
                received.congestion_experienced = is_congestion_experienced(unsafe { *data });
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                received.congestion_experienced =
                    integer().is_some_and(|class| is_congestion_experienced(class as u8));
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                received.overflowed = integer().map(libc::c_int::cast_unsigned);
            }
            _ => {}
        }
        // SAFETY: as CMSG_FIRSTHDR; `message` came from this header.
        next = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    received
}

const fn is_congestion_experienced(traffic_class: u8) -> bool {
    traffic_class & 0b11 == 0b11
}
