//! What a controller shows over HTTP: an API in JSON, metrics for Prometheus, and a page for people.
//!
//! Nothing can be changed here, so nobody is asked who he is. The daemon leaves a copy of what there is
//! ([`ControllerView`]) for the thread that serves: however much is asked, the controller does not notice.

mod documents;
mod metrics;
mod path;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};

use millstream_inc::controller::Overview;
use millstream_inc::topology::Topology;
use serde::Serialize;

use crate::prometheus;
use crate::status_server::{Page, Pages};
pub(crate) use metrics::{METRICS, edge_name};
pub(crate) use watch::Watch;

const INDEX: &str = include_str!("../page/index.html");
const STYLE: &str = include_str!("../page/page.css");
const SCRIPTS: [(&str, &str); 3] = [
    ("/layout.js", include_str!("../page/layout.js")),
    ("/drawing.js", include_str!("../page/drawing.js")),
    ("/page.js", include_str!("../page/page.js")),
];
const OPEN_API: &str = include_str!("../page/openapi.json");

/// What a controller shows: the latest copy of what it has.
#[derive(Debug, Default)]
pub struct ControllerView {
    topology: Option<Arc<Topology>>,
    overview: Mutex<Arc<Overview>>,
}

impl ControllerView {
    /// A view of a controller that is still to run, with its topology if it has one.
    pub fn new(topology: Option<Arc<Topology>>) -> Self {
        Self { topology, overview: Mutex::default() }
    }

    /// What [`crate::status_server::StatusServer`] serves.
    pub fn pages(self: Arc<Self>) -> Arc<Pages> {
        Arc::new(move |path: &str| self.page(path))
    }

    fn publish(&self, overview: Overview) {
        let overview = Arc::new(overview);
        let mut current = self.overview.lock().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *current, overview);
        drop(current);
        // Freeing a large copy takes a while, in which nobody is to wait for the lock.
        drop(old);
    }

    fn overview(&self) -> Arc<Overview> {
        Arc::clone(&self.overview.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn page(&self, path: &str) -> Option<Page> {
        let fixed = |content_type, text: &str| Page { content_type, text: text.to_owned() };
        let topology = self.topology.as_deref();
        match path {
            "/" => Some(fixed("text/html; charset=utf-8", INDEX)),
            "/page.css" => Some(fixed("text/css; charset=utf-8", STYLE)),
            "/openapi.json" => Some(fixed("application/json", OPEN_API)),
            "/metrics" => Some(prometheus::page(METRICS, &*self.overview())),
            "/api/v1/controller" => json(&self.overview().leadership),
            "/api/v1/topology" => json(&documents::topology(topology, &self.overview())),
            "/api/v1/switches" => {
                json(&documents::Switches { switches: &self.overview().switches })
            }
            "/api/v1/groups" => json(&documents::groups(&self.overview())),
            _ => match path.strip_prefix("/api/v1/groups/") {
                Some(name) => {
                    let (name, overview) = (path::decoded(name)?, self.overview());
                    // The last group of a name is the one that has it.
                    json(overview.groups.iter().rev().find(|group| group.name == name)?)
                }
                None => {
                    let (_, script) = SCRIPTS.iter().find(|(known, _)| *known == path)?;
                    Some(fixed("text/javascript; charset=utf-8", script))
                }
            },
        }
    }
}

fn json(document: &impl Serialize) -> Option<Page> {
    let text = serde_json::to_string(document).ok()? + "\n";
    Some(Page { content_type: "application/json", text })
}

#[cfg(test)]
mod tests;
