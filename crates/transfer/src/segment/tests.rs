//! Buffers by their addresses, descriptors that go stale, and peers that are asked in vain.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millstream_metadata::{CallError, CallErrorKind, SegmentDesc, StoreError, WholeDesc};

use super::*;
use crate::SegmentError;

fn descriptor(name: &str) -> SegmentDesc {
    let buffer =
        BufferDesc { name: "cpu:0".to_owned(), addr: 1000, length: 100, ..BufferDesc::default() };
    SegmentDesc { name: name.to_owned(), buffers: vec![buffer], ..SegmentDesc::default() }
}

#[test]
fn a_descriptor_that_was_begun_before_a_mark_is_stale() {
    let open = OpenSegment::new(SegmentId(1), "a", SegmentDesc::default());
    assert!(!open.is_stale());
    open.mark_stale();
    let marks = open.marks();
    open.mark_stale();
    open.set_descriptor(SegmentDesc::default(), marks);
    assert!(open.is_stale());
    open.replace_descriptor(SegmentDesc::default(), |_| {});
    assert!(!open.is_stale());
}

#[test]
fn a_view_from_before_a_refresh_is_stale() {
    const ROUNDS: u64 = 1_000_000;
    let open = OpenSegment::new(SegmentId(1), "a", SegmentDesc::default());
    let of = |round| SegmentDesc { incarnation: Some(round), ..SegmentDesc::default() };
    let marked = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                open.mark_stale();
                marked.store(round, Ordering::SeqCst);
                open.set_descriptor(of(round), open.marks());
            }
        });
        loop {
            let before = marked.load(Ordering::SeqCst);
            let (view, stale) = open.current();
            let seen = view.descriptor.incarnation.unwrap_or(0);
            assert!(stale || seen >= before, "{seen} for {before}");
            if before == ROUNDS {
                break;
            }
        }
    });
}

/// How long a question takes: so long the next one would not be asked after silence.
const SLOW: Duration = Duration::from_millis(200);

/// What a submission hears whose question nobody has answered in time, or else one that was refused.
fn unanswered(silent: bool) -> Result<(), SegmentError> {
    let kind = match silent {
        true => CallErrorKind::NoReply { waited: Duration::from_secs(1) },
        false => CallErrorKind::Closed,
    };
    let error = StoreError::Call(CallError { peer: "a:1".parse().unwrap(), kind });
    Err(SegmentError::Store { name: "a:1".to_owned(), error })
}

#[test]
fn an_answer_that_came_while_it_was_asked_in_vain_is_not_forgotten() {
    let open = OpenSegment::new(SegmentId(1), "a:1", SegmentDesc::default());
    let asked = open.ask(|| {
        std::thread::sleep(SLOW);
        // Somebody else.
        open.answered();
        unanswered(true)
    });
    assert!(matches!(asked, Err(SegmentError::Store { .. })), "{asked:?}");
    let asked = open.ask(|| Ok(()));
    assert!(asked.is_ok(), "{asked:?}");
}

#[test]
fn a_slow_refusal_is_not_silence() {
    let open = OpenSegment::new(SegmentId(1), "a:1", SegmentDesc::default());
    let refused = open.ask(|| {
        std::thread::sleep(SLOW);
        unanswered(false)
    });
    assert!(matches!(refused, Err(SegmentError::Store { .. })));
    let asked = open.ask(|| Ok(()));
    assert!(asked.is_ok(), "{asked:?}");
}

#[test]
fn offsets_become_addresses() {
    let table = SegmentTable::new(descriptor("a:1"));
    let segment = Segment { open: table.by_id(SegmentId::LOCAL).unwrap() };
    assert_eq!(segment.address_of(0, 0, 100), Ok(1000));
    assert_eq!(segment.address_of(0, 99, 1), Ok(1099));
    assert_eq!(
        segment.address_of(0, 99, 2).unwrap_err().to_string(),
        "2 bytes at offset 99 do not fit a buffer of 100 bytes"
    );
    assert!(segment.address_of(0, u64::MAX, 2).is_err());
    assert_eq!(segment.address_of(1, 0, 1).unwrap_err().code(), -1);
}

#[test]
fn buffers_are_found_in_any_order() {
    let buffer = |addr, length| BufferDesc { addr, length, ..BufferDesc::default() };
    let buffers = vec![buffer(300, 50), buffer(100, 100), buffer(200, 100), buffer(120, 10)];
    let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
    for (address, length, found) in [
        (100, 1, Some(1)),
        (199, 1, Some(1)),
        (199, 2, None),
        (200, 100, Some(2)),
        (349, 1, Some(0)),
        (350, 1, None),
        (99, 1, None),
        (300, u64::MAX, None),
        // They lie on each other.
        (125, 5, Some(3)),
        (125, 6, Some(1)),
        (150, 1, Some(1)),
    ] {
        assert_eq!(view.find(address, length), found, "{address} {length}");
    }
}

#[test]
fn a_bad_buffer_is_not_found_and_hides_no_other() {
    let buffer = |addr, length, fault| BufferDesc { addr, length, fault, ..Default::default() };
    let buffers = vec![
        buffer(100, 100, None),
        buffer(150, u64::MAX, Some("exceeds the address space")),
        buffer(200, 100, None),
    ];
    let table = SegmentTable::new(SegmentDesc { buffers, ..SegmentDesc::default() });
    let segment = Segment { open: table.by_id(SegmentId::LOCAL).unwrap() };
    let view = segment.open.view();
    let found = [(160, 40), (200, 100), (150, 51), (300, 1)].map(|(at, n)| view.find(at, n));
    assert_eq!(found, [Some(0), Some(2), None, None]);
    let told = segment.address_of(1, 0, 1).unwrap_err();
    assert!(told.to_string().contains("since it exceeds the address space"), "{told}");
    assert_eq!((told.code(), segment.address_of(2, 0, 1)), (-1, Ok(200)));
    assert_eq!([0, 1, 2].map(|index| view.length_from(index)), [100, 0, 100]);
    let [_, bad, _] = &segment.buffers()[..] else { panic!("{segment:?}") };
    assert_eq!((bad.length, bad.fault), (u64::MAX - 150, Some("exceeds the address space")));
}

/// As of memory whose pages are on several nodes.
#[test]
fn buffers_with_the_same_keys_are_one_piece() {
    let buffer = |addr, length, key: Option<u32>, shm_key| BufferDesc {
        addr,
        length,
        rkey: key.into_iter().collect(),
        shm_key,
        ..BufferDesc::default()
    };
    // Regions of one piece of memory, with keys of their own.
    let part = |address, length, whole| BufferDesc {
        part_of: Some(WholeDesc { addr: whole, region_length: NonZeroU64::new(10).unwrap() }),
        ..buffer(address, length, Some(address as u32), None)
    };
    let buffers = vec![
        buffer(100, 100, Some(1), Some(5)),
        buffer(200, 100, Some(1), Some(5)),
        buffer(300, 100, Some(1), Some(5)),
        buffer(400, 100, Some(2), Some(5)),
        buffer(500, 100, Some(2), None),
        buffer(700, 100, None, None),
        buffer(800, 100, None, None),
        buffer(900, 10, None, Some(7)),
        buffer(910, 10, None, Some(7)),
        buffer(921, 10, None, Some(7)),
        part(1000, 10, 1000),
        part(1010, 10, 1000),
        part(1020, 10, 1000),
        part(1030, 10, 1030),
    ];
    let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
    for (address, length, found) in [
        (100, 300, Some(0)),
        (199, 2, Some(0)),
        (250, 150, Some(1)),
        (100, 301, None),
        (399, 2, None),
        (499, 2, None),
        (599, 2, None),
        (650, 100, None),
        (799, 2, None),
        (1000, 30, Some(10)),
        (1015, 10, Some(11)),
        (1015, 20, None),
        (900, 20, Some(7)),
        (900, 22, None),
        (100, u64::MAX, None),
    ] {
        assert_eq!(view.find(address, length), found, "{address} {length}");
    }
}

#[test]
fn a_slice_has_the_keys_of_the_region_where_it_begins() {
    let part = |addr, whole: Option<u64>| BufferDesc {
        addr,
        length: 10,
        rkey: vec![addr as u32],
        part_of: whole.map(|addr| WholeDesc { addr, region_length: NonZeroU64::new(10).unwrap() }),
        ..BufferDesc::default()
    };
    let buffers =
        vec![part(110, Some(100)), part(100, Some(100)), part(120, Some(120)), part(130, None)];
    let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
    let key = |buffer, address| view.part(buffer, address).map(|it| it.rkey[0]);
    assert_eq!([100, 109, 110, 119].map(|it| key(1, it)), [100, 100, 110, 110].map(Some));
    assert_eq!([99, 120, 130, u64::MAX].map(|it| key(1, it)), [None; 4]);
    assert_eq!(key(3, 5), Some(130), "of no parts there is one key");
    assert_eq!(key(4, 100), None);
    assert_eq!([0, 1, 2, 3, 4].map(|it| view.length_from(it)), [10, 20, 10, 10, 0]);
}

#[test]
fn a_name_has_one_number_until_it_is_closed() {
    let table = SegmentTable::new(descriptor("a:1"));
    let first = table.insert("b:2", descriptor("b:2"), None).unwrap().id;
    assert_eq!(table.insert("b:2", descriptor("b:2"), None).unwrap().id, first);
    assert_ne!(table.insert("c:3", descriptor("c:3"), None).unwrap().id, first);
    table.remove(first).unwrap();
    assert!(table.by_id(first).is_none());
    assert_ne!(table.insert("b:2", descriptor("b:2"), None).unwrap().id, first, "never used again");
    assert!(matches!(table.remove(first), Err(SegmentError::Unknown(_))));
    assert!(table.remove(SegmentId::LOCAL).is_err());
    assert_eq!(table.by_name("a:1").unwrap().id, SegmentId::LOCAL);
}
