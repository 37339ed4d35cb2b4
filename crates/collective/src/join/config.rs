//! What a rank joins with.

use std::time::Duration;

use millstream_inc::controllers::Controllers;
use millstream_net::tls::CallerTls;
use millstream_net::token::Token;
use millstream_verbs::Device;

use crate::path::Path;

/// What a rank joins with.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Where controllers listen. With several, the one that leads is looked for, for as long as the group may take.
    pub controllers: Controllers,
    /// The group's name, the same on all ranks.
    pub group: String,
    /// How many ranks there are, the same on all: 1 to 65,536.
    pub world: u32,
    /// Which of them this is, from 0.
    pub rank: u32,
    /// The device that connects to the switch.
    pub device: Device,
    /// Further devices, of other NICs: for each number of devices that all ranks have there is a tree of its own, if the
    /// network has one, and long vectors are divided among them. Up to 8 with the first.
    pub more_devices: Vec<Device>,
    /// By which way collectives may go.
    pub path: Path,
    /// Divides a machine: only ranks that say the same can be of one host, and share memory. Up to 32 bytes, none unless
    /// this was set.
    pub host_label: String,
    /// Sums, products and averages of floats do not depend on who comes first: the same calls on the same trees have
    /// the same bits. What one rank asks for, all have. Ranks that share memory always have it.
    pub reproducible: bool,
    /// Whether the ranks' own processes take the place of switches where there is none. One rank that does not want that
    /// decides for all: then they wait for a switch, and joining fails without one.
    pub fallback: bool,
    /// Whether copies are kept of what results overwrite in place: a window of segments for each tree, 2 MiB unless the
    /// controller says otherwise. Without, the loss of a switch ends a communicator during such a call, though there is
    /// fall-back. Of no meaning without fall-back.
    pub keep_overwritten: bool,
    /// How long to wait for the other ranks and for a switch, and for room at the controller. Up to 6 s of it a rank waits for
    /// the end of a process that has its place in the group.
    pub timeout: Duration,
    /// How long a collective may take. Then the switch is asked whom it waits for, which takes up to 2.5 s, and the
    /// collective fails unless it ends meanwhile. Ranks that die are noticed at once; this is for ranks that live
    /// and do not call.
    pub call_timeout: Duration,
    /// What the controller and this rank prove to each other that they have. Without, a controller that has tokens refuses
    /// this rank, and nobody proves that he is the controller.
    pub token: Option<Token>,
    /// TLS with the controller, which needs it then.
    pub tls: Option<CallerTls>,
}

impl JoinConfig {
    /// With 30 s for the group, and 60 s for a collective, and fall-back.
    pub fn new(
        controllers: impl Into<Controllers>,
        group: impl Into<String>,
        world: u32,
        rank: u32,
        device: &Device,
    ) -> Self {
        Self {
            controllers: controllers.into(),
            group: group.into(),
            world,
            rank,
            device: device.clone(),
            more_devices: Vec::new(),
            path: Path::Auto,
            host_label: String::new(),
            reproducible: false,
            fallback: true,
            keep_overwritten: true,
            timeout: Duration::from_secs(30),
            call_timeout: Duration::from_secs(60),
            token: None,
            tls: None,
        }
    }
}
