//! Which transport takes the requests of a command, and why others do not.

use anyhow::bail;
use millstream_transfer::PathReport;
use serde::Serialize;

use crate::engine::Opened;
use crate::failure::usage;

/// What `--json` says of a transport.
#[derive(Clone, Serialize)]
pub(crate) struct Path {
    transport: &'static str,
    chosen: bool,
    /// Why not, or why not for all of the segment.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// What there is to say of the paths to the segment.
pub(crate) fn of(opened: &Opened) -> anyhow::Result<Vec<Path>> {
    let path = |PathReport { transport, chosen, reason }| Path { transport, chosen, reason };
    let mut paths: Vec<_> = reports(opened)?.into_iter().map(path).collect();
    paths.extend(missing(&opened.missing));
    Ok(paths)
}

/// Those that could not be installed.
pub(crate) fn missing(missing: &[(&'static str, String)]) -> Vec<Path> {
    let path = |(transport, reason): &(&'static str, String)| Path {
        transport,
        chosen: false,
        reason: Some(reason.clone()),
    };
    missing.iter().map(path).collect()
}

/// The transport that takes requests to the start of the segment.
pub(crate) fn chosen(opened: &Opened) -> anyhow::Result<Option<&'static str>> {
    Ok(reports(opened)?.iter().find(|report| report.chosen).map(|report| report.transport))
}

fn reports(opened: &Opened) -> anyhow::Result<Vec<PathReport>> {
    Ok(opened.engine.paths(opened.segment.id())?)
}

/// Has requests go by this transport, whichever else leads there. Fails now where it does not.
pub(crate) fn require(opened: &Opened, required: &str) -> anyhow::Result<()> {
    let instead = match chosen(opened)? {
        Some(name) => format!("it would go by {name}"),
        None => "no other transport leads there either".to_owned(),
    };
    if let Some((_, reason)) = opened.missing.iter().find(|(name, _)| *name == required) {
        bail!("--require {required}: it is not to be had here: {reason} ({instead})");
    }
    if opened.engine.require(Some(required)).is_err() {
        let lacking = format!("--require {required}: --protocol does not have it ({instead})");
        return Err(usage(lacking));
    }
    let reports = reports(opened)?;
    let report = reports.iter().find(|report| report.transport == required);
    match report.and_then(|report| report.reason.as_ref()) {
        Some(reason) => {
            let segment = opened.segment.name();
            bail!("--require {required}: not to segment {segment}: {reason} ({instead})");
        }
        None => Ok(()),
    }
}
