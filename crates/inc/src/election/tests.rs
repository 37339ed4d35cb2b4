//! The election by hand, and three candidates at a store that stalls.

use super::*;

mod leader;
mod stalls;

fn at(seconds: f64) -> Instant {
    Instant::ZERO + Duration::from_secs_f64(seconds)
}

const TIME: Duration = Duration::from_secs(5);

fn ask(election: &mut Election, now: f64) -> Request {
    election.poll_request(at(now)).unwrap_or_else(|| panic!("nothing is asked at {now}"))
}

fn failed(again: bool) -> Reply {
    Reply::Failed { reason: "etcd://a:1: down".to_owned(), again }
}

/// One that leads since 0 s with lease 7, revision 30 and term 5.
fn leader() -> Election {
    let mut election = Election::new();
    assert_eq!(ask(&mut election, 0.0), Request::Grant);
    election.handle_reply(at(0.1), Reply::Granted { lease: 7, time: TIME });
    assert_eq!(ask(&mut election, 0.1), Request::Campaign { lease: 7 });
    let won = Reply::Campaigned { revision: Some(30), leader: None, term: 4 };
    election.handle_reply(at(0.2), won);
    assert_eq!(ask(&mut election, 0.2), Request::SetTerm { revision: 30, term: 5 });
    assert_eq!(election.leads_until(), None);
    election.handle_reply(at(0.3), Reply::TermSet { leads: true, term: 5 });
    assert_eq!(ask(&mut election, 0.3), Request::Load { after: None });
    let record = |key: &str| (key.to_owned(), "{}".to_owned());
    election.handle_reply(at(0.4), Reply::Loaded { records: vec![record("a")], more: true });
    assert_eq!(ask(&mut election, 0.4), Request::Load { after: Some("a".to_owned()) });
    election.handle_reply(at(0.5), Reply::Loaded { records: vec![record("b")], more: false });
    let records = vec![record("a"), record("b")];
    assert_eq!(election.poll_event(), Some(Event::Lead { term: 5, records }));
    assert_eq!(ask(&mut election, 0.5), Request::List);
    election.handle_reply(at(0.6), Reply::Listed { controllers: Vec::new() });
    // From when the lease was asked for, and not to its end.
    assert_eq!(election.leads_until(), Some(at(4.5)));
    assert_eq!(election.poll_request(at(0.9)), None);
    election
}

fn stands_down(election: &mut Election, text: &str) {
    match election.poll_event() {
        Some(Event::StandDown { reason }) => assert!(reason.contains(text), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(election.leads_until(), None);
}

#[test]
fn a_lease_counts_from_when_its_renewal_was_sent() {
    let mut election = leader();
    assert_eq!(election.poll_timeout(), Some(at(1.0)));
    assert_eq!(ask(&mut election, 1.0), Request::Renew { lease: 7 });
    assert_eq!(election.poll_timeout(), Some(at(4.5)));
    election.handle_reply(at(4.0), Reply::Renewed { time: Some(TIME) });
    assert_eq!(election.leads_until(), Some(at(5.5)));
    assert_eq!(ask(&mut election, 4.0), Request::Renew { lease: 7 });
    election.handle_reply(at(4.1), failed(true));
    assert_eq!((election.poll_request(at(4.5)), election.poll_timeout()), (None, Some(at(4.6))));
    assert_eq!(ask(&mut election, 4.6), Request::Renew { lease: 7 });
    election.handle_timeout(at(5.5));
    stands_down(&mut election, "not renewed in time: etcd://a:1: down");
    // The answer to a question of before is none of a new lease.
    election.handle_reply(at(5.6), Reply::Renewed { time: Some(TIME) });
    assert_eq!(election.leads_until(), None);
    assert_eq!(ask(&mut election, 5.6), Request::Grant);
}

#[test]
fn who_stood_still_does_not_lead_though_the_renewal_was_answered_in_time() {
    let mut election = leader();
    assert_eq!(ask(&mut election, 1.0), Request::Renew { lease: 7 });
    let renewed = Reply::Renewed { time: Some(TIME) };
    election.handle_reply(at(30.0), renewed);
    stands_down(&mut election, "not renewed in time");
    assert_eq!(ask(&mut election, 30.0), Request::Grant);
}

#[test]
fn where_all_controllers_are_is_asked_again_and_again() {
    let election = leader();
    assert!(election.controllers().is_empty(), "and not again where the store does not keep that");
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let mut election = Election { list_at: Some(at(0.7)), ..election };
    let listed =
        |ports: &[u16]| Reply::Listed { controllers: ports.iter().copied().map(address).collect() };
    assert_eq!(ask(&mut election, 0.7), Request::List);
    election.handle_reply(at(0.8), listed(&[1]));
    // Renewals go first.
    assert_eq!(ask(&mut election, 2.9), Request::Renew { lease: 7 });
    election.handle_reply(at(2.9), Reply::Renewed { time: Some(TIME) });
    assert_eq!(ask(&mut election, 2.9), Request::List);
    election.handle_reply(at(3.0), listed(&[1, 2]));
    assert_eq!(election.controllers(), [1, 2].map(address));
    // That it fails is no trouble of the leader.
    ask(&mut election, 3.9);
    election.handle_reply(at(4.0), Reply::Renewed { time: Some(TIME) });
    assert_eq!((election.poll_request(at(4.8)), election.poll_timeout()), (None, Some(at(4.9))));
    ask(&mut election, 4.9);
    election.handle_reply(at(4.9), Reply::Renewed { time: Some(TIME) });
    assert_eq!(ask(&mut election, 5.0), Request::List);
    election.handle_reply(at(5.1), failed(true));
    assert_eq!((election.trouble(), election.controllers().len()), (None, 2));
}

#[test]
fn who_loses_the_key_or_the_lease_stands_down() {
    let mut election = leader();
    ask(&mut election, 1.0);
    election.handle_reply(at(1.1), Reply::Renewed { time: None });
    stands_down(&mut election, "its lease was over");
    let mut election = leader();
    election.change(("c".to_owned(), None));
    let changes = vec![("c".to_owned(), None)];
    assert_eq!(ask(&mut election, 0.6), Request::Write { revision: 30, changes });
    election.handle_reply(at(0.7), Reply::Written { leads: false });
    stands_down(&mut election, "another one has its key");
}

/// It leads anew with another revision when that comes.
#[test]
fn what_was_written_with_a_key_of_before_says_nothing_of_a_later_one() {
    for leads in [true, false] {
        let mut election = leader();
        let change = ("c".to_owned(), Some("{}".to_owned()));
        election.change(change.clone());
        assert!(matches!(ask(&mut election, 0.6), Request::Write { revision: 30, .. }));
        election.stage = Stage::Leading { revision: 31 };
        election.handle_reply(at(0.7), Reply::Written { leads });
        assert_eq!(election.poll_event(), None);
        let changes = vec![change];
        assert_eq!(ask(&mut election, 0.7), Request::Write { revision: 31, changes });
    }
}

#[test]
fn with_a_term_that_none_could_be_above_nobody_leads() {
    for (term, leads) in [(MAX_TERM, false), (MAX_TERM - 1, false), (MAX_TERM - 2, true)] {
        let mut election = Election::new();
        ask(&mut election, 0.0);
        election.handle_reply(at(0.1), Reply::Granted { lease: 7, time: TIME });
        ask(&mut election, 0.1);
        let won = Reply::Campaigned { revision: Some(30), leader: None, term };
        election.handle_reply(at(0.2), won);
        if leads {
            let term = MAX_TERM - 1;
            assert_eq!(ask(&mut election, 0.2), Request::SetTerm { revision: 30, term });
        } else {
            assert!(election.trouble().unwrap().contains("out of range"));
            assert_eq!(ask(&mut election, 0.7), Request::Campaign { lease: 7 });
        }
    }
}

#[test]
fn changes_are_written_in_turn_and_the_last_of_a_key_counts() {
    let mut election = leader();
    let value = |text: &str| Some(text.to_owned());
    election.change(("k".to_owned(), value("1")));
    let first = ask(&mut election, 0.6);
    // While that is under way.
    election.change(("k".to_owned(), value("2")));
    election.change(("a".to_owned(), None));
    let changes = vec![("k".to_owned(), value("1"))];
    assert_eq!(first, Request::Write { revision: 30, changes });
    election.handle_reply(at(0.7), Reply::Written { leads: true });
    let changes = vec![("a".to_owned(), None), ("k".to_owned(), value("2"))];
    let second = Request::Write { revision: 30, changes };
    assert_eq!(ask(&mut election, 0.7), second);
    election.handle_reply(at(0.8), failed(true));
    assert_eq!(election.poll_request(at(0.9)), None);
    // Renewals go first.
    assert_eq!(ask(&mut election, 1.3), Request::Renew { lease: 7 });
    election.handle_reply(at(1.3), Reply::Renewed { time: Some(TIME) });
    assert_eq!(ask(&mut election, 1.3), second);
    // What the store will never take is not asked for again.
    election.handle_reply(at(1.4), failed(false));
    assert!(election.trouble().is_some());
    assert_eq!(ask(&mut election, 2.5), Request::Renew { lease: 7 });
}

#[test]
fn requests_and_what_waits_are_bounded() {
    let mut election = leader();
    for number in 0..3 * MAX_PENDING {
        election.change((number.to_string(), Some("x".repeat(100))));
        assert!(election.pending.len() <= MAX_PENDING);
    }
    let Request::Write { changes, .. } = ask(&mut election, 0.6) else { panic!() };
    assert_eq!(changes.len(), MAX_CHANGES);
    let mut election = leader();
    for key in ["a", "b"] {
        election.change((key.to_owned(), Some("x".repeat(MAX_CHANGE_BYTES))));
    }
    let Request::Write { changes, .. } = ask(&mut election, 0.6) else { panic!() };
    assert_eq!(changes.len(), 1);
}

#[test]
fn who_leads_and_has_nothing_to_write_has_room_and_gives_its_lease_back() {
    let mut election = leader();
    // As many as one request takes.
    assert_eq!(election.room(), MAX_CHANGES);
    assert_eq!(election.resign(), Some(Request::Release { lease: 7 }));
    election.change(("k".to_owned(), None));
    assert_eq!(election.room(), 0, "others are to be written");
    let election = Election::new();
    assert_eq!(election.room(), 0, "it does not lead");
    assert_eq!(election.resign(), None);
}
