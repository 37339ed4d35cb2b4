//! How memory is registered.

use super::*;
use crate::ibverbs::MemoryRegion;

#[test]
fn relaxed_ordering_is_asked_for_as_an_optional_access_unless_it_is_off() {
    let access = millstream_roce::Access::LOCAL_WRITE | millstream_roce::Access::REMOTE_WRITE;
    for relaxed_ordering in [true, false] {
        let config = IbverbsConfig { relaxed_ordering, ..IbverbsConfig::default() };
        let fake = Fake::open_with(&config);
        let domain = ProtectionDomain::allocate(&fake.device);
        let mut bytes = [0_u8; 64];
        // SAFETY: the region is gone before the bytes are, and nobody else uses them.
        let region = unsafe {
            MemoryRegion::register(&domain, bytes.as_mut_ptr(), bytes.len(), access).unwrap()
        };
        drop(region);
        let expected = match relaxed_ordering {
            true => Registered::WithOptional(access.bits() | ffi::ACCESS_RELAXED_ORDERING),
            false => Registered::Plain(access.bits()),
        };
        assert_eq!(*lock(&fake.script.registered), [expected]);
    }
}
