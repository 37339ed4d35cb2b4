//! What a flow is made with.

use core::time::Duration;

/// Limits and times of a [`crate::Flow`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Config {
    /// Bytes of a slice: 1 KiB to 64 MiB.
    pub slice_length: u32,
    /// A rest of up to `slice_length` divided by this goes along with the last slice: from 1.
    pub fragment_ratio: u32,
    /// At most so many pieces in a slice.
    pub max_slice_pieces: u32,
    /// At most so many unfinished tasks.
    pub max_tasks: usize,
    /// At most so many pieces in the lists of unfinished tasks.
    pub max_pieces: usize,
    /// At most so many pairs of a local and a peer's location.
    pub max_locations: usize,
    /// How often a slice may end in an error of its rail before its task fails.
    pub max_attempts: u8,
    /// A rail that connects for longer has failed.
    pub connect_timeout: Duration,
    /// A rail on which something is in flight and nothing completes for so long has failed.
    pub silence: Duration,
    /// How long a connection bears silence before it breaks by itself, if that is shorter than `silence`:
    /// from then on a fence is waited for at a rail that was judged earlier.
    pub connection_silence: Duration,
    /// While other rails of the flow complete, one that is measured has failed after 8 round trips of
    /// silence, or 4 times what it needs for what is in flight, but not before this; and one on which slices have
    /// completed regularly after 3 times what it needs, or 4 times its longest pause, but not before
    /// [`Config::least_regular_silence`].
    pub least_silence: Duration,
    /// See `least_silence`, which it is not longer than.
    pub least_regular_silence: Duration,
    /// How often the peer is asked to confirm a fence.
    pub fence_interval: Duration,
    /// How long its confirmation is waited for, by tasks that are to end. Those that are to go on wait for
    /// `patience`, if that is longer.
    pub fence_timeout: Duration,
    /// A task for which there has been no rail for so long fails. It begins when it is submitted, and when
    /// something of it comes back from a rail that failed; and anew when there was a rail.
    pub patience: Duration,
    /// So many failures within `failure_window` pause a rail. So many slices in a row that fail on a rail
    /// of [`crate::Access::Own`] are a failure.
    pub failures: u32,
    /// See `failures`.
    pub failure_window: Duration,
    /// How long a rail pauses the first time. It doubles each time that the rail fails before it
    /// has completed anything.
    pub pause: Duration,
    /// The longest pause.
    pub max_pause: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slice_length: 64 << 10,
            fragment_ratio: 4,
            max_slice_pieces: 16,
            max_tasks: 1 << 20,
            max_pieces: 1 << 20,
            max_locations: 256,
            max_attempts: 10,
            connect_timeout: Duration::from_secs(1),
            silence: Duration::from_secs(3),
            connection_silence: Duration::from_secs(3),
            least_silence: Duration::from_millis(100),
            least_regular_silence: Duration::from_millis(50),
            fence_interval: Duration::from_millis(250),
            fence_timeout: Duration::from_secs(2),
            patience: Duration::from_secs(4),
            failures: 3,
            failure_window: Duration::from_secs(10),
            pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(30),
        }
    }
}
