//! What a candidate knows of the leader, and what one that wins reads first.

use super::*;

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A candidate with lease 7 that has asked for the leader's key at 0.1 s.
fn candidate() -> Election {
    let mut election = Election::new();
    ask(&mut election, 0.0);
    election.handle_reply(at(0.1), Reply::Granted { lease: 7, time: TIME });
    assert_eq!(ask(&mut election, 0.1), Request::Campaign { lease: 7 });
    election
}

/// One that has won with revision 30, and whose term is stored.
fn won() -> Election {
    let mut election = candidate();
    let won = Reply::Campaigned { revision: Some(30), leader: None, term: 4 };
    election.handle_reply(at(0.2), won);
    assert_eq!(ask(&mut election, 0.2), Request::SetTerm { revision: 30, term: 5 });
    election
}

#[test]
fn who_does_not_lead_knows_who_does_and_asks_again() {
    let mut election = candidate();
    assert_eq!(election.leader(), None);
    let other = |port| Reply::Campaigned { revision: None, leader: Some(address(port)), term: 4 };
    election.handle_reply(at(0.2), other(1));
    assert_eq!((election.leader(), election.leads_until()), (Some(address(1)), None));
    assert!(election.room() == 0 && election.poll_event().is_none());
    // Where all are is asked beside it, and the key again half a second later.
    assert_eq!(ask(&mut election, 0.2), Request::List);
    election.handle_reply(at(0.3), Reply::Listed { controllers: vec![address(1), address(2)] });
    assert_eq!((election.poll_request(at(0.6)), election.poll_timeout()), (None, Some(at(0.7))));
    assert_eq!(ask(&mut election, 0.7), Request::Campaign { lease: 7 });
    election.handle_reply(at(0.8), other(2));
    assert_eq!(election.leader(), Some(address(2)));
}

#[test]
fn who_stands_down_knows_of_no_leader() {
    let mut election = leader();
    election.leader = Some(address(1));
    ask(&mut election, 1.0);
    election.handle_reply(at(1.1), Reply::Renewed { time: None });
    stands_down(&mut election, "its lease was over");
    assert_eq!(election.leader(), None);
}

/// A leader before has asked the store for it, and that came late.
#[test]
fn a_term_that_was_stored_meanwhile_is_exceeded() {
    let mut election = won();
    election.handle_reply(at(0.3), Reply::TermSet { leads: true, term: 8 });
    assert_eq!(ask(&mut election, 0.3), Request::SetTerm { revision: 30, term: 9 });
    election.handle_reply(at(0.4), Reply::TermSet { leads: true, term: 9 });
    assert_eq!(ask(&mut election, 0.4), Request::Load { after: None });
    election.handle_reply(at(0.5), Reply::Loaded { records: Vec::new(), more: false });
    assert_eq!(election.poll_event(), Some(Event::Lead { term: 9, records: Vec::new() }));
}

#[test]
fn who_has_lost_the_key_before_its_term_was_stored_begins_anew() {
    let mut election = won();
    election.handle_reply(at(0.3), Reply::TermSet { leads: false, term: 4 });
    assert_eq!(election.poll_event(), None, "it never led");
    assert_eq!(ask(&mut election, 0.3), Request::Grant);
}

#[test]
fn no_more_records_are_read_than_a_leader_keeps() {
    let mut election = won();
    election.handle_reply(at(0.3), Reply::TermSet { leads: true, term: 5 });
    let record = |number: usize| (format!("{number:08}"), "{}".to_owned());
    for half in 0..2 {
        let first = half * MAX_RECORDS / 2;
        let after = first.checked_sub(1).map(|last| record(last).0);
        assert_eq!(ask(&mut election, 0.3), Request::Load { after });
        assert_eq!(election.poll_event(), None);
        let records = (first..first + MAX_RECORDS / 2).map(record).collect();
        election.handle_reply(at(0.3), Reply::Loaded { records, more: true });
    }
    let Some(Event::Lead { records, .. }) = election.poll_event() else { panic!() };
    assert_eq!(records.len(), MAX_RECORDS);
}

#[test]
fn a_request_has_as_many_bytes_as_it_may_and_no_more() {
    let half = MAX_CHANGE_BYTES / 2;
    for (bytes, together) in [(half, 2), (half + 1, 1)] {
        let mut election = super::leader();
        for key in ["a", "b"] {
            election.change((key.to_owned(), Some("x".repeat(bytes))));
        }
        let Request::Write { changes, .. } = ask(&mut election, 0.6) else { panic!() };
        assert_eq!(changes.len(), together, "{bytes}");
    }
}

#[test]
fn changes_that_the_store_takes_none_of_are_dropped_with_a_word() {
    let mut election = super::leader();
    for number in 0..MAX_PENDING {
        election.change((number.to_string(), None));
    }
    assert_eq!((election.trouble(), election.room()), (None, 0));
    election.change(("last".to_owned(), None));
    assert!(election.trouble().unwrap().contains("are dropped"));
    let changes = vec![("last".to_owned(), None)];
    assert_eq!(ask(&mut election, 0.6), Request::Write { revision: 30, changes });
}
