//! What a command line asks for: which collective, of what, how.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use millstream_collective::{Call, Collective, DataType, ReduceOperation};
use serde::Serialize;

use crate::failure::usage;

/// How elements are combined and how they travel.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Reduction {
    /// Type of the elements
    #[arg(long, value_name = "T", default_value = "int32", value_parser = data_types())]
    pub(crate) dtype: DataType,
    /// Operation
    #[arg(long, value_name = "O", default_value = "sum", value_parser = operations())]
    pub(crate) op: ReduceOperation,
    /// How vectors travel
    #[arg(long, value_enum, default_value_t = Mode::Write)]
    pub(crate) mode: Mode,
}

/// `--mode`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// RDMA WRITE: the result lands where it belongs
    Write,
    /// SEND into receive requests
    Send,
}

impl Mode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Send => "send",
        }
    }
}

impl From<Mode> for millstream_collective::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Write => Self::Write,
            Mode::Send => Self::Send,
        }
    }
}

/// `--path`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Path {
    /// Through shared memory among the ranks of one machine, over switches between machines
    Auto,
    /// Over switches, each rank for itself, also on one machine
    Switch,
    /// Through shared memory alone, or not at all
    SharedMemory,
}

impl Path {
    pub(crate) fn name(self) -> &'static str {
        millstream_collective::Path::from(self).name()
    }
}

impl From<Path> for millstream_collective::Path {
    fn from(path: Path) -> Self {
        match path {
            Path::Auto => Self::Auto,
            Path::Switch => Self::Switch,
            Path::SharedMemory => Self::SharedMemory,
        }
    }
}

/// `--fallback`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Fallback {
    /// The ranks' own processes take its place
    On,
    /// The ranks wait for one, and fail without
    Off,
}

/// `--keep-overwritten`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum KeepOverwritten {
    /// It goes on: copies are kept of what results overwrite, 2 MiB for each tree
    On,
    /// It ends, and the communicator with it
    Off,
}

/// For `--dtype`.
pub(crate) fn data_types() -> impl TypedValueParser<Value = DataType> {
    let names = DataType::ALL.iter().map(|data_type| data_type.name());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// For `--op`.
pub(crate) fn operations() -> impl TypedValueParser<Value = ReduceOperation> {
    let names = ReduceOperation::ALL.iter().map(|operation| operation.name());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// For `--collective`.
pub(super) fn collectives() -> impl TypedValueParser<Value = Collective> {
    let names = Collective::ALL.iter().map(|collective| collective.name());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

impl Default for Reduction {
    fn default() -> Self {
        Self { dtype: DataType::Int32, op: ReduceOperation::Sum, mode: Mode::Write }
    }
}

/// Whether there is such an operation on elements of this type.
pub(crate) const fn is_defined(operation: ReduceOperation, data_type: DataType) -> bool {
    let bits = matches!(
        operation,
        ReduceOperation::BitAnd | ReduceOperation::BitOr | ReduceOperation::BitXor
    );
    !(bits && is_float(data_type))
}

const fn is_float(data_type: DataType) -> bool {
    matches!(
        data_type,
        DataType::Float16 | DataType::BFloat16 | DataType::Float32 | DataType::Float64
    )
}

/// A collective of vectors of any length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) call: Call,
    pub(crate) reduction: Reduction,
    pub(crate) in_place: bool,
}

impl Work {
    /// Checks what does not depend on lengths.
    pub(crate) fn new(
        collective: Collective,
        reduction: Reduction,
        root: u32,
        in_place: bool,
        world: u32,
    ) -> anyhow::Result<Self> {
        let call = match collective {
            Collective::AllReduce => Call::AllReduce(reduction.op),
            Collective::Reduce => Call::Reduce { operation: reduction.op, root },
            Collective::Broadcast => Call::Broadcast { root },
            Collective::Barrier => Call::Barrier,
            Collective::ReduceScatter => Call::ReduceScatter(reduction.op),
            Collective::AllGather => Call::AllGather,
        };
        if let Some(operation) = call.operation()
            && !is_defined(operation, reduction.dtype)
        {
            let data_type = reduction.dtype;
            return Err(usage(format!("--op {operation}: there is none of {data_type}")));
        }
        if let Some(root) = call.root()
            && root >= world
        {
            return Err(usage(format!("--root {root}: ranks are 0 to {}", world - 1)));
        }
        Ok(Self { call, reduction, in_place })
    }

    /// How many elements each rank calls it with, as in the table of [`Call`], where `size` are the bytes
    /// of the longer vector. Where that has a part for each rank, all are of one length, and the rest is
    /// left out, as nccl-tests does.
    pub(crate) fn count(&self, size: u64, world: u32) -> anyhow::Result<usize> {
        let data_type = self.reduction.dtype;
        let element = u64::from(data_type.size());
        let count = match self.call {
            Call::Barrier => return Ok(0),
            Call::ReduceScatter(_) | Call::AllGather => size / element / u64::from(world),
            _ if size.is_multiple_of(element) => size / element,
            _ => {
                return Err(usage(format!(
                    "--size {size}: elements of {data_type} have {element} bytes each"
                )));
            }
        };
        usize::try_from(count).map_err(|_| usage(format!("--size {size} is too much")))
    }

    /// Bytes of the longer vector.
    pub(crate) fn bytes(&self, count: usize, world: u32) -> u64 {
        let parts = match self.call {
            Call::ReduceScatter(_) | Call::AllGather => world,
            _ => 1,
        };
        count as u64 * u64::from(parts) * u64::from(self.reduction.dtype.size())
    }

    /// What a rate of the algorithm is multiplied by to compare it with the rate of the links, as in
    /// nccl-tests: what a ring moves over each link, in parts of the size.
    pub(crate) fn bus_factor(&self, world: u32) -> f64 {
        let others = f64::from(world - 1) / f64::from(world);
        match self.call {
            Call::AllReduce(_) => 2.0 * others,
            Call::ReduceScatter(_) | Call::AllGather => others,
            Call::Reduce { .. } | Call::Broadcast { .. } | Call::Barrier => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(collective: Collective, dtype: DataType) -> Work {
        let reduction = Reduction { dtype, ..Reduction::default() };
        Work::new(collective, reduction, 0, false, 4).unwrap()
    }

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        for (collective, size, count, bytes, factor) in [
            (Collective::AllReduce, 4096, 1024, 4096, 1.5),
            (Collective::Reduce, 4096, 1024, 4096, 1.0),
            (Collective::Broadcast, 4096, 1024, 4096, 1.0),
            (Collective::Barrier, 4096, 0, 0, 1.0),
            (Collective::ReduceScatter, 4096, 256, 4096, 0.75),
            (Collective::AllGather, 4100, 256, 4096, 0.75),
        ] {
            let work = work(collective, DataType::Float32);
            assert_eq!(work.count(size, 4).unwrap(), count, "{collective}");
            assert_eq!(work.bytes(count, 4), bytes, "{collective}");
            assert_eq!(work.bus_factor(4).to_bits(), f64::to_bits(factor), "{collective}");
        }
        let odd = work(Collective::AllReduce, DataType::Float16).count(7, 4).unwrap_err();
        assert!(odd.to_string().contains("fp16 have 2 bytes"), "{odd}");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let reduction = |dtype, op| Reduction { dtype, op, mode: Mode::Write };
        let floats = reduction(DataType::BFloat16, ReduceOperation::BitXor);
        let error = Work::new(Collective::Reduce, floats, 0, false, 4).unwrap_err();
        assert!(error.to_string().contains("bxor") && error.to_string().contains("bf16"));
        // It is not used.
        assert!(Work::new(Collective::AllGather, floats, 9, false, 4).is_ok());
        let error = Work::new(Collective::Broadcast, floats, 4, false, 4).unwrap_err();
        assert!(error.to_string().contains("--root 4"), "{error}");
    }
}
