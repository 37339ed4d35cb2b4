//! The table of all settings.

mod devices;
mod engine;
mod nvmeof;
mod rdma;
mod tcp;

use super::kind::Kind;

/// A setting.
pub(in crate::settings) struct Setting {
    /// Its name: the key in a file, with its table before the dot.
    pub(in crate::settings) key: &'static str,
    /// The environment variables that have it. The first that is there counts.
    pub(in crate::settings) variables: &'static [&'static str],
    pub(in crate::settings) kind: Kind,
    /// What has it.
    pub(in crate::settings) scope: Scope,
    /// What it does, in sentences.
    pub(in crate::settings) meaning: &'static str,
}

/// Where a setting has its effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::settings) enum Scope {
    Engine,
    Rdma,
    Soft,
    Ibverbs,
    Tcp,
    Nvmeof,
    Command,
}

impl Scope {
    pub(in crate::settings) const fn name(self) -> &'static str {
        match self {
            Self::Engine => "every engine",
            Self::Rdma => "the transport rdma",
            Self::Soft => "soft devices",
            Self::Ibverbs => "the system's devices",
            Self::Tcp => "the transport tcp",
            Self::Nvmeof => "the transport nvmeof",
            Self::Command => "the command millstream",
        }
    }
}

/// All settings. A setting that nothing acts on has no row.
pub(in crate::settings) fn settings() -> impl Iterator<Item = &'static Setting> {
    [engine::ROWS, rdma::ROWS, devices::ROWS, tcp::ROWS, nvmeof::ROWS].into_iter().flatten()
}
