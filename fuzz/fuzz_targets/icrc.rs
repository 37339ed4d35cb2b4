#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    millstream_wire::fuzz::icrc(data);
});
