//! Why there is no lab, or a command about it failed.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use thiserror::Error;

use crate::ParseRateError;

/// What is wrong with a plan.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The file is no TOML of this form.
    #[error("{0}")]
    Syntax(#[from] Box<toml::de::Error>),
    /// A host without a network is no lab.
    #[error("the plan has no hosts")]
    NoHosts,
    /// There is a limit on everything.
    #[error("{count} {what}, more than {max}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        max: usize,
    },
    /// A name that interfaces and scripts cannot have.
    #[error(
        "the name {0:?}: write letters, digits and hyphens, a letter first; a host's has 1 to 32, a switch's 1 to 8"
    )]
    Name(String),
    /// Two hosts or switches have one name.
    #[error("there are two of the name {0}")]
    Duplicate(String),
    /// A link's end is nowhere.
    #[error("a link ends at {0}, which is no host and no switch")]
    UnknownEnd(String),
    /// A link between two that have no use for it.
    #[error("a link between {0} and {1}: one end at least is a host, and the other another one")]
    Ends(String, String),
    /// A router is a host.
    #[error("{0} is to be a router, and is no host")]
    UnknownRouter(String),
    /// The ends of a link do not understand each other.
    #[error("a link between {0} and {1}: both addresses are IPv4, or both IPv6")]
    Families(IpAddr, IpAddr),
    /// Two NICs of a host in one subnet: the kernel sends by the first of them only.
    #[error("{host} is linked to {switch} twice: each NIC needs a subnet, so a switch of its own")]
    Twice {
        /// The host.
        host: String,
        /// The switch.
        switch: String,
    },
    /// An MTU that not both families of addresses can have.
    #[error("an MTU of {0}: it is 1280 to 65535")]
    Mtu(u32),
    /// A link without an address.
    #[error("the link between {0} and {1} has no family of addresses")]
    NoFamily(String, String),
    /// A delay.
    #[error("a delay of {0}: write 5ms or 500us")]
    Delay(String),
    /// A share of packets.
    #[error("a loss of {0} %: it is 0 to 100")]
    Loss(f64),
    /// A rate.
    #[error(transparent)]
    Rate(#[from] ParseRateError),
}

/// Why there is no lab, or a command about it failed.
#[derive(Debug, Error)]
pub enum LabError {
    /// The plan cannot be built.
    #[error("the plan: {0}")]
    Plan(#[from] PlanError),
    /// This machine does not have, or does not allow, what a lab is made of. A test is skipped.
    #[error("{0}")]
    Unavailable(String),
    /// A name that the lab does not know.
    #[error("there is no {0} in this lab")]
    Unknown(String),
    /// A program that changes namespaces failed.
    #[error("{what}: {message}")]
    Failed {
        /// What it was to do.
        what: String,
        /// What it said.
        message: String,
    },
    /// Nobody has made it, or it is gone.
    #[error("there is no lab {name} in {}: make it by `lab up FILE`, or say which by --name", base.display())]
    NoLab {
        /// Its name.
        name: String,
        /// Where labs are noted.
        base: PathBuf,
    },
    /// Its name is in use.
    #[error("there is a lab {0} already: end it by `lab down`, or use --name")]
    Exists(String),
    /// A folder that is not known to be that of a lab that is gone.
    #[error(
        "{} is there without the record of a lab: another `lab up` makes it, or was killed by SIGKILL while it did; \
         if none does, remove the folder, or use --name",
        .0.display()
    )]
    Folder(PathBuf),
    /// What is noted of a lab, which may be there all the same.
    #[error(
        "the record of a lab in {} cannot be read, and the lab may be there ({source}): end it by the version that made \
         it; if there is none, remove the folder, or use --name",
        folder.display()
    )]
    Record {
        /// The folder.
        folder: PathBuf,
        /// Why it cannot be read.
        source: io::Error,
    },
    /// What it says could be meant to harm.
    #[error("{} belongs to another user: use --name or --directory", .0.display())]
    Foreign(PathBuf),
    /// A name that is no part of a path.
    #[error("--name {0:?}: write letters, digits, - and _, 1 to 32 of them")]
    LabName(String),
    /// It was told to end, and is there.
    #[error("the lab {name} does not go: its folder {} is there", folder.display())]
    Stays {
        /// Its name.
        name: String,
        /// Its folder.
        folder: PathBuf,
    },
    /// The operating system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl LabError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
