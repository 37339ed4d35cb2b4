//! A collective as a rank calls it.

use crate::{Collective, DataType, ReduceOperation, Stripe};

/// By which operations of RDMA the vectors travel.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Mode {
    /// RDMA WRITE: the switch writes the result to where the rank says.
    #[default]
    Write,
    /// SEND: the result goes where the rank's receives say.
    Send,
}

/// A collective to start. All ranks call it with the same values, but for keys and addresses.
///
/// | collective | source | destination |
/// |---|---|---|
/// | AllReduce | `count` elements | `count` |
/// | Reduce | `count` | `count` at the root, none elsewhere |
/// | Broadcast | `count` at the root, none elsewhere | `count`, also at the root |
/// | Barrier | none | none |
/// | ReduceScatter | world x `count`, one part for each rank | `count` |
/// | AllGather | `count` | world x `count`, one part of each rank |
///
/// Source and destination may be the same memory; of ReduceScatter and AllGather the smaller one may be the
/// rank's own part of the larger one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CollectiveCall {
    /// What happens to the data.
    pub collective: Collective,
    /// What the elements are.
    pub data_type: DataType,
    /// How they are combined, where they are.
    pub operation: ReduceOperation,
    /// The rank that is special, where one is; otherwise 0.
    pub root: u32,
    /// How many elements: see above.
    pub count: u64,
    /// Which of them are computed here. Addresses are of the whole vectors.
    pub stripe: Stripe,
    /// How the vectors travel.
    pub mode: Mode,
    /// Local key of the source's region.
    pub source_key: u32,
    /// Address of this rank's vector.
    pub source_address: u64,
    /// Key of the destination's region: the remote one in WRITE mode, the local one in SEND mode.
    pub destination_key: u32,
    /// Address of the result. It may be the source's.
    pub destination_address: u64,
}
