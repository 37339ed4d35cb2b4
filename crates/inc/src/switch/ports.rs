//! What has moved through the ports of a switch's communicators, for whoever watches the network.

use millstream_roce::QueuePairCounters;
use millstream_wire::Qpn;

use super::SwitchNode;
use crate::communicator::CommunicatorStatistics;

/// What one communicator of a switch has counted.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CommunicatorCounts {
    /// Its number.
    pub communicator: u64,
    /// What it has computed.
    pub statistics: CommunicatorStatistics,
    /// Its ports: to the children, in the order of the lowest ranks below them, then the way up if it has one.
    pub ports: Vec<PortCounts>,
}

/// What one port has counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortCounts {
    /// The lowest rank below the child; `None` of the way up.
    pub rank: Option<u32>,
    /// The switch's queue pair.
    pub qpn: Qpn,
    /// What that has counted.
    pub counters: QueuePairCounters,
}

impl SwitchNode {
    /// What all communicators have counted, by their numbers: as much as there are ports.
    pub fn counts(&self) -> Vec<CommunicatorCounts> {
        let of = |(&communicator, &index): (&u64, &u32)| {
            let it = self.endpoint.memory().get(index)?;
            let port = |port: usize| {
                let qpn = it.qpn(port);
                let rank = it.children.get(port).map(|child| child.rank);
                Some(PortCounts { rank, qpn, counters: self.endpoint.queue_pair_counters(qpn)? })
            };
            let ports = (0..it.ports()).filter_map(port).collect();
            Some(CommunicatorCounts { communicator, statistics: it.statistics(), ports })
        };
        self.communicators.iter().filter_map(of).collect()
    }
}
