//! Shared receive queues: keeping them filled, and what is left of them.

use millstream_roce::{Access, Usage};

use super::datagrams::Port;
use super::director::{Action, DOMAIN, Director, Network};
use super::execution::UNTOUCHED;
use crate::NodeId;

impl Director {
    /// A host starts: its shared receive queue is empty.
    pub(super) fn start_pool(&mut self, network: &mut Network<'_>, host: usize) {
        let Some(pool) = &mut self.pools[host] else { return };
        let memory = network.machine_mut(NodeId(host)).endpoint_mut(None).memory_mut();
        match memory.regions.register(DOMAIN, pool.address, Access::LOCAL_WRITE, pool.blank()) {
            Ok(key) => pool.key = key,
            Err(error) => network.violate(format!("host {host}: register: {error}")),
        }
        self.fill_pool(network, host);
    }

    /// Posts to the shared receive queue what there is to post.
    pub(super) fn fill_pool(&mut self, network: &mut Network<'_>, host: usize) {
        let Some(pool) = &mut self.pools[host] else { return };
        if pool.starved_until > network.now() || !network.is_up(NodeId(host)) {
            return;
        }
        let machine = network.machine_mut(NodeId(host));
        let Some(queue) = machine.shared_receives() else { return };
        let mut result = Ok(());
        while let Some((request, range)) = pool.next() {
            let endpoint = machine.endpoint_mut(None);
            let bytes = endpoint.memory_mut().regions.region_mut(pool.key);
            if let Some(bytes) = bytes.and_then(|bytes| bytes.get_mut(range)) {
                bytes.fill(UNTOUCHED);
            }
            let posted = endpoint.post_shared_receive(queue, &request);
            result = result.and(posted.map_err(|error| format!("post_shared_receive: {error}")));
        }
        if !machine.has_limit() && machine.level() >= pool.plan.limit {
            let set = machine.set_limit(pool.plan.limit);
            result = result.and(set.map_err(|error| format!("set_shared_receive_limit: {error}")));
        }
        if let Err(what) = result {
            network.violate(format!("host {host}: {what}"));
        }
    }

    /// A slot of a host's shared receive queue is free: it is posted again after a while.
    pub(super) fn release(&mut self, network: &mut Network<'_>, host: usize, slot: usize) {
        let Some(pool) = &mut self.pools[host] else { return };
        pool.release(slot);
        let lag = pool.plan.lag;
        self.plan_after(network, lag, Action::FillPool(host));
    }

    /// At rest a host keeps nothing but what was posted, and in the end nothing at all.
    pub(super) fn close_host(&mut self, network: &mut Network<'_>, host: usize) {
        let node = NodeId(host);
        let posted = self.pools[host].as_ref().map_or(0, |pool| pool.posted());
        let usage = network.machine(node).endpoint().usage();
        let right = Usage { shared_receive_requests: posted, ..Usage::default() };
        if usage != right {
            network.violate(format!("host {host}: keeps {usage:?} at rest"));
        }
        let counters = network.machine(node).counters();
        let unreceived: u64 = counters.map(|counters| counters.dropped_no_receive).sum();
        if unreceived != self.unreceived[host] && self.tally.count("completion queues overrun") == 0
        {
            let right = self.unreceived[host];
            network.violate(format!(
                "host {host}: {unreceived} datagrams without a receive request, {right} are right"
            ));
        }
        if let Some(pool) = &self.pools[host] {
            let memory = network.machine(node).endpoint().memory();
            if !pool.is_untouched(memory.regions.region(pool.key).unwrap_or_default()) {
                network.violate(format!("host {host}: receive buffers are not as they were"));
            }
        }
        let shares = self.shares(host);
        let machine = network.machine_mut(node);
        let result = machine.remove_all(shares);
        let usage = machine.endpoint().usage();
        if let Err(what) = result {
            network.violate(format!("host {host}: {what}"));
        } else if usage != Usage::default() {
            network.violate(format!("host {host}: keeps {usage:?} in the end"));
        }
    }

    /// Whether a queue pair of a host uses its shared receive queue.
    fn shares(&self, host: usize) -> bool {
        let is_it = |port: &Port| port.plan.host == host && port.plan.shares && port.qpn.is_some();
        self.ports.iter().any(is_it)
            || self.connections.iter().enumerate().any(|(index, connection)| {
                (0..2).any(|end| {
                    connection.hosts[end] == host
                        && connection.ends[end].qpn.is_some()
                        && self.streams[2 * index + 1 - end].plan.shares
                })
            })
    }
}
