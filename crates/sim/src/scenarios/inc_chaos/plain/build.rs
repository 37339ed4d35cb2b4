//! Making plain hosts.

use core::time::Duration;

use millstream_inc::ACKNOWLEDGEMENT_DELAY;
use millstream_roce::{Access, Piece, QueuePairCapabilities, QueuePairConfig};
use millstream_wire::{Psn, Qpn};

use super::super::build::{Host, draw_psn};
use super::super::call::Arena;
use super::super::member::Call;
use super::super::mismatch::Absence;
use super::super::world::Group;
use super::{Member, Plain};
use crate::Rng;
use crate::rank::DOMAIN;

impl Host {
    /// Makes a rank's queue pair and memory; where its switch finds it.
    pub(in super::super) fn add_plain(
        &mut self,
        rng: &mut Rng,
        (number, group, plain): (usize, &Group, &Plain),
        rank: u32,
        arenas: Vec<Arena>,
    ) -> (Qpn, Psn) {
        let (sends, receives) = (plain.lead + 1, plain.lead + 1);
        let completions = self.endpoint.create_completion_queue(sends + receives);
        let completions = completions.expect("each rank has one completion queue");
        let capabilities = QueuePairCapabilities::new(sends, receives);
        let config = QueuePairConfig {
            acknowledgement_delay: match plain.is_prompt {
                true => Duration::ZERO,
                false => ACKNOWLEDGEMENT_DELAY,
            },
            ..QueuePairConfig::new(DOMAIN, completions, capabilities)
        };
        let qpn = self.endpoint.create_queue_pair(&config).expect("each rank has one queue pair");
        let mut calls = Vec::new();
        for (index, mut arena) in arenas.into_iter().enumerate() {
            self.changes_sources |= arena.is_in_place();
            let at = self.register(rng, Access::LOCAL_WRITE, arena.bytes.clone());
            arena.registered(&group.shape(index, rank), &[rank], group.sizes.world, at);
            let pause = match rng.below(4) {
                0..3 => 0,
                _ => rng.below(3_000_000),
            };
            let pause = Duration::from_nanos(pause);
            calls.push(Call { key: at.0, arena, pause, started: None });
        }
        let mut leaves_out = None;
        for &Absence { call, late, .. } in group.absences.iter().filter(|it| it.rank == rank) {
            match late {
                Some(late) => calls[call].pause = late,
                None => leaves_out = Some(call),
            }
        }
        let breach = plain.breach.filter(|&(rude, ..)| rude == rank).map(|(_, call, breach)| {
            let length = group.sizes.segment_bytes + 8;
            let (key, address) = self.register(rng, Access::LOCAL_WRITE, vec![0; length as usize]);
            (call, breach, Piece { key, address, length })
        });
        let own = Rng::new(rng.bits());
        let mut member = Member::new((number, rank), (qpn, completions), calls, plain.lead, own);
        member.differs_at = group.mismatch.map(|(call, ..)| call);
        (member.leaves_out, member.breach) = (leaves_out, breach);
        self.plain.push(member);
        (qpn, draw_psn(rng))
    }
}
