//! Groups as C knows them.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use millstream_collective::{Group, JoinConfig, JoinError, Token};
use millstream_net::tls::CallerTls;

use super::codes::{self, argument, failure};
use super::settings::{Said, Settings};
use crate::boundary::{self, Failure};
use crate::forked::PerProcess;
use crate::handles::Giver;

static GROUPS: PerProcess<Ranks> = PerProcess::new();

/// What C has for a group.
pub(super) type GroupPointer = *mut c_void;

/// A group.
#[derive(Debug)]
pub(super) struct Ranks {
    /// Locked while a communicator is made: they are made one after the other.
    pub(super) group: Mutex<Group>,
}

/// `struct inccl_options`.
#[repr(C)]
pub(super) struct RawOptions {
    size: usize,
    controller: *const c_char,
    group: *const c_char,
    bind: *const c_char,
    join_timeout_ms: u32,
    call_timeout_ms: u32,
}

/// # Safety
///
/// `controller_ip` is null or a text.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_group_create(
    world_size: c_int,
    controller_ip: *const c_char,
    rank: c_int,
) -> GroupPointer {
    boundary::value(ptr::null_mut(), || {
        // SAFETY: the caller promises it.
        let controller = unsafe { boundary::optional("controller_ip", controller_ip) };
        let controller = controller.map_err(|failure| failure.with(codes::ARGUMENT))?;
        create(world_size, rank, &Said { controller, ..Said::default() })
    })
}

/// # Safety
///
/// `options` is null, or points to as many bytes as it says in the first of its fields; its texts are null or texts. `group` is
/// null or may be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_group_create_v2(
    world_size: c_int,
    rank: c_int,
    options: *const RawOptions,
    group: *mut GroupPointer,
) -> c_int {
    codes::code(|| {
        // SAFETY: the caller promises it.
        let said = unsafe { said(options)? };
        if group.is_null() {
            return Err(argument("there is no place for the group"));
        }
        let made = create(world_size, rank, &said)?;
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { group.write(made) };
        Ok(codes::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_group_destroy(group: GroupPointer) {
    if group.is_null() {
        return;
    }
    codes::said("inccl_group_destroy", || {
        find(group)?;
        drop(GROUPS.handles().remove(group.addr() as u64).ok_or_else(|| unknown(group))?);
        Ok(())
    });
}

/// The group that a pointer of this process means.
pub(super) fn find(group: GroupPointer) -> Result<Arc<Ranks>, Failure> {
    if group.is_null() {
        return Err(argument("the group is null"));
    }
    let (groups, handle) = (GROUPS.handles(), group.addr() as u64);
    match groups.giver(handle) {
        Giver::This => groups.find(handle).ok_or_else(|| unknown(group)),
        Giver::Other => Err(argument(
            "the group is of the process that this one was forked off: create one here",
        )),
    }
}

fn unknown(group: GroupPointer) -> Failure {
    argument(format!("{:#x} is no group, or one that was destroyed", group.addr()))
}

impl Ranks {
    /// Makes a communicator.
    pub(super) fn communicator(&self) -> Result<millstream_collective::Communicator, Failure> {
        // A panic within leaves a group that has counted it or not, as a failure does.
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        group.communicator().map_err(failure)
    }
}

fn create(world_size: c_int, rank: c_int, said: &Said<'_>) -> Result<GroupPointer, Failure> {
    let world = u32::try_from(world_size).ok().filter(|&world| world > 0);
    let world = world.ok_or_else(|| {
        argument(format!("world_size is {world_size}: a group has 1 rank or more"))
    })?;
    let rank = u32::try_from(rank).ok().filter(|&rank| rank < world).ok_or_else(|| {
        argument(format!("rank is {rank}: with world_size {world}, ranks are 0 to {}", world - 1))
    })?;
    let settings = Settings::new(said)?;
    let group = join(world, rank, &settings)?;
    let ranks = Ranks { group: Mutex::new(group) };
    let handle = GROUPS.handles().insert(Arc::new(ranks));
    let handle = handle.ok_or_else(|| Failure::new(codes::BUSY, "there are too many groups"))?;
    Ok(ptr::without_provenance_mut(handle as usize))
}

/// Joins by the first of the controller's addresses that can be reached.
fn join(world: u32, rank: u32, settings: &Settings) -> Result<Group, Failure> {
    let token = settings.token_file.as_deref().map(Token::from_file).transpose();
    let token = token.map_err(|error| argument(format!("INCCL_TOKEN_FILE: {error}")))?;
    let tls = settings.tls.as_ref().map(|files| CallerTls::from_files(files, &settings.host));
    let tls = tls.transpose().map_err(|error| {
        argument(format!("INCCL_TLS_CA, INCCL_TLS_CERTIFICATE and INCCL_TLS_KEY: {error}"))
    })?;
    first_reached(&settings.controllers, |controller| {
        let peer = controller.first().ip();
        let device = settings.open_device(peer).map_err(NotJoined::Unreached)?;
        let name = settings.group.as_str();
        let mut config = JoinConfig::new(controller.clone(), name, world, rank, &device);
        config.more_devices = settings.open_more_devices().map_err(NotJoined::Unreached)?;
        config.path = settings.path;
        config.reproducible = settings.reproducible;
        config.fallback = settings.fallback;
        config.keep_overwritten = settings.keep_overwritten;
        config.token = token;
        config.tls.clone_from(&tls);
        config.timeout = settings.join_timeout.unwrap_or(config.timeout);
        config.call_timeout = settings.call_timeout.unwrap_or(config.call_timeout);
        Group::create(&config).map_err(|error| match error {
            JoinError::Unreachable { .. } => NotJoined::Unreached(failure(error)),
            error => NotJoined::Refused(failure(error)),
        })
    })
}

/// Why an address of the controller is no good.
enum NotJoined {
    /// There is no way to it, or no device for one: another address may do.
    Unreached(Failure),
    /// There is a controller, and it would say the same by another address.
    Refused(Failure),
}

/// Tries addresses until one is reached. When none is, the first one's failure counts.
fn first_reached<C, T>(
    controllers: &[C],
    join: impl Fn(&C) -> Result<T, NotJoined>,
) -> Result<T, Failure> {
    let mut first = None;
    for controller in controllers {
        match join(controller) {
            Ok(joined) => return Ok(joined),
            Err(NotJoined::Refused(failure)) => return Err(failure),
            Err(NotJoined::Unreached(failure)) => first = first.or(Some(failure)),
        }
    }
    // There is one at least.
    Err(first.unwrap_or_else(|| argument("no controller")))
}

/// # Safety
///
/// As of [`inccl_group_create_v2`].
unsafe fn said<'a>(options: *const RawOptions) -> Result<Said<'a>, Failure> {
    if options.is_null() {
        return Ok(Said::default());
    }
    // SAFETY: it is not null, and has a size at least.
    let size = unsafe { (&raw const (*options).size).read_unaligned() };
    if size != size_of::<RawOptions>() || !options.is_aligned() {
        return Err(argument(format!(
            "options has size {size}: it is sizeof(struct inccl_options), {}, of the library's header",
            size_of::<RawOptions>()
        )));
    }
    // SAFETY: it is aligned and as long as it should be, the caller says.
    let options = unsafe { &*options };
    let text = |what, text| {
        // SAFETY: the caller promises it.
        unsafe { boundary::optional(what, text) }.map_err(|failure| failure.with(codes::ARGUMENT))
    };
    Ok(Said {
        controller: text("controller", options.controller)?,
        group: text("group", options.group)?,
        bind: text("bind", options.bind)?,
        join_timeout_ms: options.join_timeout_ms,
        call_timeout_ms: options.call_timeout_ms,
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn an_address_without_a_device_or_a_controller_is_left_for_the_next_one() {
        let addresses = ["[::1]:1", "127.0.0.1:1", "127.0.0.1:2"].map(|it| it.parse().unwrap());
        let [no_device, reached, other] = addresses;
        let outcome = |controllers: &[SocketAddr], refused: bool| {
            let joined = first_reached(controllers, |&controller| match refused {
                _ if controller != reached => {
                    Err(NotJoined::Unreached(argument(format!("not {controller}"))))
                }
                true => Err(NotJoined::Refused(argument("refused"))),
                false => Ok(controller),
            });
            joined.map_err(|failure| failure.text().to_owned())
        };
        assert_eq!(outcome(&addresses, false), Ok(reached));
        assert_eq!(outcome(&addresses, true), Err("refused".to_owned()));
        assert_eq!(outcome(&[no_device, other], false), Err("not [::1]:1".to_owned()));
        assert_eq!(outcome(&[other, no_device], false), Err("not 127.0.0.1:2".to_owned()));
    }
}
