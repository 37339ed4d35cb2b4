//! The links between the namespace of our side and guests, and who boots a guest at the end of one.

use std::path::Path;

use anyhow::Result;

use super::guest::Guest;
use super::image::Image;
use super::lab::Lab;
use super::relay::Relay;

/// The first guest's address, and ours on the link to it.
pub(super) const GUEST: &str = "10.91.0.2";
pub(super) const OURS: &str = "10.91.0.1";
/// Of both ends of every link: every path MTU fits.
pub(super) const MTU: u32 = 9000;

/// A link, which is a network of its own.
#[derive(Clone, Copy)]
pub(super) struct Link {
    /// Our end, a tap device.
    pub(super) tap: &'static str,
    pub(super) ours: &'static str,
    pub(super) guest: &'static str,
}

impl Link {
    /// To the guest in which nearly all rows run.
    pub(super) const FIRST: Self = Self { tap: "rxe0", ours: OURS, guest: GUEST };
    /// To one that a row boots for itself.
    pub(super) const SECOND: Self = Self { tap: "rxe1", ours: "10.92.0.1", guest: "10.92.0.2" };
}

/// What guests are made of.
#[derive(Clone, Copy)]
pub(super) struct Machines<'a> {
    pub(super) lab: &'a Lab,
    pub(super) image: &'a Image,
    /// The relay's program.
    pub(super) cable: &'a Path,
    pub(super) accelerator: &'a str,
}

impl Machines<'_> {
    /// Boots a guest at the end of `link`.
    pub(super) fn boot(&self, link: Link) -> Result<(Relay, Guest)> {
        let relay = Relay::start(self.lab, self.cable, link)?;
        let guest = Guest::boot(self.image, self.accelerator, self.lab, &relay)?;
        Ok((relay, guest))
    }
}
