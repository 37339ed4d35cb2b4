//! What the kernel says of a frame, and we to it: the header of `PACKET_VNET_HDR`
//! (`struct virtio_net_hdr`, in the byte order of the machine).

/// Bytes of the header.
pub(super) const LENGTH: usize = 10;

/// The checksum is to be computed from `checksum_start` on: on the way out by the kernel or the
/// interface; on the way in nobody has, since the frame has not left this machine.
const NEEDS_CHECKSUM: u8 = 1;
/// The interface has verified the checksum.
const CHECKSUM_VALID: u8 = 2;

/// No segmentation.
const ONE: u8 = 0;
/// UDP datagrams of one length but for the last (`VIRTIO_NET_HDR_GSO_UDP_L4`, since Linux 6.2).
const UDP_SEGMENTS: u8 = 5;

/// Where the UDP checksum lies in the UDP header.
const UDP_CHECKSUM_OFFSET: u16 = 6;

/// What of it concerns UDP.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Offload {
    /// The frame holds several datagrams of this many bytes (the last may be shorter) behind one
    /// header.
    pub(super) segment: Option<u16>,
    /// The UDP checksum: on the way out, where the UDP header starts, if the kernel is to complete
    /// it; on the way in, `Some` when it is not to be looked at.
    pub(super) checksum_start: Option<u16>,
    /// Somebody has verified the checksum.
    pub(super) verified: bool,
}

/// A kind of segmentation that is not UDP's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Foreign;

impl Offload {
    /// `headers` are the bytes of all headers of the frame.
    pub(super) fn to_bytes(self, headers: u16) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        // Only a hint, and worth it: the kernel keeps these together, and the rest in pages.
        bytes[2..4].copy_from_slice(&headers.to_ne_bytes());
        if let Some(segment) = self.segment {
            bytes[1] = UDP_SEGMENTS;
            bytes[4..6].copy_from_slice(&segment.to_ne_bytes());
        }
        if let Some(start) = self.checksum_start {
            bytes[0] = NEEDS_CHECKSUM;
            bytes[6..8].copy_from_slice(&start.to_ne_bytes());
            bytes[8..].copy_from_slice(&UDP_CHECKSUM_OFFSET.to_ne_bytes());
        }
        bytes
    }

    pub(super) fn parse(bytes: &[u8; LENGTH]) -> Result<Self, Foreign> {
        let [flags, kind, _, _, s0, s1, c0, c1, ..] = *bytes;
        let segment = match kind {
            ONE => None,
            UDP_SEGMENTS => match u16::from_ne_bytes([s0, s1]) {
                0 => return Err(Foreign),
                segment => Some(segment),
            },
            _ => return Err(Foreign),
        };
        let needed = flags & NEEDS_CHECKSUM != 0;
        Ok(Self {
            segment,
            checksum_start: needed.then(|| u16::from_ne_bytes([c0, c1])),
            verified: flags & CHECKSUM_VALID != 0,
        })
    }
}

/// Whether the kernel can describe segments of UDP so: by its release, since the only other way to
/// know is to send some.
pub(super) fn kernel_has_udp_segments() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").is_ok_and(|release| has_them(&release))
}

fn has_them(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 2),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let plain = Offload::default();
        assert_eq!(plain.to_bytes(0), [0; LENGTH]);
        let segmented =
            Offload { segment: Some(4112), checksum_start: Some(34), ..Offload::default() };
        for offload in [plain, segmented, Offload { segment: None, ..segmented }] {
            assert_eq!(Offload::parse(&offload.to_bytes(42)), Ok(offload));
        }
        let expected = [&[1, 5][..], &42_u16.to_ne_bytes(), &4112_u16.to_ne_bytes()].concat();
        assert_eq!(segmented.to_bytes(42)[..6], expected);
    }

    #[test]
    fn other_kinds_of_segmentation_are_foreign() {
        let mut bytes = Offload { segment: Some(1), ..Offload::default() }.to_bytes(0);
        for (kind, segment) in [(1, 1), (3, 1), (4, 1), (0x81, 1), (0x85, 1), (5, 0)] {
            bytes[1] = kind;
            bytes[4..6].copy_from_slice(&u16::to_ne_bytes(segment));
            assert_eq!(Offload::parse(&bytes), Err(Foreign), "{kind} {segment}");
        }
        bytes[0] = CHECKSUM_VALID;
        bytes[1] = ONE;
        assert!(Offload::parse(&bytes).unwrap().verified);
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        for release in ["6.2.0", "6.18.44-generic", "10.0", "7.0-rc1\n"] {
            assert!(has_them(release), "{release}");
        }
        for release in ["6.1.192", "5.15.0-1.el9", "4.18", "", "x.y", "6"] {
            assert!(!has_them(release), "{release}");
        }
    }
}
