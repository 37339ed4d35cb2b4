//! What a group is made with: what the caller says, and else the environment.

use std::env;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use millstream_collective::{Controllers, DEFAULT_PORT, Path};
use millstream_net::address::{first_free_loopback, local_address_for};
use millstream_net::tls::CallerFiles;
use millstream_verbs::{Device, DeviceChoice, DeviceConfig, DeviceError, Provider};

use super::codes::{self, argument};
use crate::boundary::Failure;

/// The name of a group that was given none.
const GROUP: &str = "default";

/// Variables by which launchers name a job, those that belong together in a row. The first row of which all are set
/// counts.
const JOBS: [&[&str]; 5] = [
    &["PMIX_NAMESPACE"],
    &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    &["PBS_JOBID"],
    &["LSB_JOBID"],
    &["FLUX_JOB_ID"],
];

/// The port of RoCEv2.
const ROCE_PORT: u16 = 4791;

/// How often another loopback address is tried when a process takes the one just found.
const ATTEMPTS: usize = 64;

/// Where a rank's group is, and how patient it is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Settings {
    /// All addresses of the controller's name, one after the other; or one list of several controllers.
    pub(super) controllers: Vec<Controllers>,
    /// The group's name at the controller.
    pub(super) group: String,
    /// The addresses of the NICs to use, if it was said.
    pub(super) bind: Vec<IpAddr>,
    pub(super) join_timeout: Option<Duration>,
    pub(super) call_timeout: Option<Duration>,
    pub(super) path: Path,
    /// Sums of floats do not depend on which rank comes first.
    pub(super) reproducible: bool,
    /// Whether the ranks take the place of switches where there is none.
    pub(super) fallback: bool,
    /// Whether copies are kept of what results overwrite in place, so that such calls survive the loss of a switch.
    pub(super) keep_overwritten: bool,
    /// The file of the token that rank and controller prove to each other.
    pub(super) token_file: Option<PathBuf>,
    /// The files of TLS with the controller, which needs it then.
    pub(super) tls: Option<CallerFiles>,
    /// The host for which the controller's certificate is to be.
    pub(super) host: String,
}

/// What a caller says. What is `None`, the environment says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said<'a> {
    pub(super) controller: Option<&'a str>,
    pub(super) group: Option<&'a str>,
    pub(super) bind: Option<&'a str>,
    pub(super) join_timeout_ms: u32,
    pub(super) call_timeout_ms: u32,
}

impl Settings {
    pub(super) fn new(said: &Said<'_>) -> Result<Self, Failure> {
        Self::with(said, |name| match env::var(name) {
            Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(_)) => Err(argument(format!("{name} is no UTF-8"))),
        })
    }

    fn with(
        said: &Said<'_>,
        variable: impl Fn(&str) -> Result<Option<String>, Failure>,
    ) -> Result<Self, Failure> {
        let text = |said: Option<&str>, name: &str| match said {
            Some(text) => Ok(Some(text.to_owned())),
            None => variable(name),
        };
        let controller = text(said.controller.filter(|it| !it.is_empty()), "INCCL_CONTROLLER")?;
        let controller = controller.ok_or_else(|| {
            argument("no controller was named: give its address, or set INCCL_CONTROLLER")
        })?;
        let group = text(said.group, "INCCL_GROUP")?.unwrap_or_else(|| GROUP.to_owned());
        let said_bind = said.bind.filter(|it| !it.is_empty());
        let bind = text(said_bind, "INCCL_BIND")?;
        let source = if said_bind.is_some() { "bind" } else { "INCCL_BIND" };
        let address = |bind: &str| {
            let wrong =
                || argument(format!("{source}: {bind:?} is not the address of an interface"));
            bind.parse().map_err(|_| wrong())
        };
        let bind = bind.iter().flat_map(|all| all.split(',')).map(address);
        let job = job(&variable)?;
        Ok(Self {
            controllers: controllers(&controller)?,
            group: job.map_or(group.clone(), |job| format!("{group}@{job}")),
            bind: bind.collect::<Result<Vec<IpAddr>, Failure>>()?,
            join_timeout: timeout(said.join_timeout_ms, "INCCL_JOIN_TIMEOUT_MS", &variable)?,
            call_timeout: timeout(said.call_timeout_ms, "INCCL_CALL_TIMEOUT_MS", &variable)?,
            path: match variable("INCCL_PATH")? {
                Some(name) => name
                    .parse::<Path>()
                    .map_err(|error| argument(format!("INCCL_PATH: {error}")))?,
                None => Path::Auto,
            },
            reproducible: match variable("INCCL_REPRODUCIBLE")?.as_deref() {
                None | Some("0") => false,
                Some("1") => true,
                Some(other) => {
                    return Err(argument(format!(
                        "INCCL_REPRODUCIBLE: {other:?} is neither 0 nor 1"
                    )));
                }
            },
            fallback: match variable("INCCL_FALLBACK")?.as_deref() {
                None | Some("on") => true,
                Some("off") => false,
                Some(other) => {
                    return Err(argument(format!(
                        "INCCL_FALLBACK: {other:?} is neither on nor off"
                    )));
                }
            },
            keep_overwritten: match variable("INCCL_KEEP_OVERWRITTEN")?.as_deref() {
                None | Some("on") => true,
                Some("off") => false,
                Some(other) => {
                    return Err(argument(format!(
                        "INCCL_KEEP_OVERWRITTEN: {other:?} is neither on nor off"
                    )));
                }
            },
            token_file: variable("INCCL_TOKEN_FILE")?.map(PathBuf::from),
            tls: tls(&variable)?,
            host: host(&controller).to_owned(),
        })
    }

    /// Opens those of further NICs, which each have a tree of their own.
    pub(super) fn open_more_devices(&self) -> Result<Vec<Device>, Failure> {
        let failed = |error: DeviceError| Failure::new(codes::DEVICE, error);
        let more = self.bind.iter().skip(1);
        more.map(|&address| open(address, None).map_err(failed)).collect()
    }

    /// Opens the device that a rank uses towards this controller.
    pub(super) fn open_device(&self, controller: IpAddr) -> Result<Device, Failure> {
        let failed = |error: DeviceError| Failure::new(codes::DEVICE, error);
        if let Some(&address) = self.bind.first() {
            return open(address, None).map_err(failed);
        }
        if !(controller.is_loopback() && controller.is_ipv4()) {
            let address = local_address_for(controller).map_err(|error| {
                let what = format!("no local address leads to {controller} ({error})");
                Failure::new(codes::DEVICE, format!("{what}: choose one with INCCL_BIND"))
            })?;
            return open(address, None).map_err(failed);
        }
        // Each process has an address of its own, so that captures tell them apart.
        for _ in 0..ATTEMPTS {
            let Some(address) = first_free_loopback(ROCE_PORT) else { break };
            match open(address.into(), Some(Provider::Soft)) {
                Err(DeviceError::Soft(error)) if error.is_in_use() => {}
                opened => return opened.map_err(failed),
            }
        }
        let text = format!(
            "UDP port {ROCE_PORT} is in use on all of 127.0.0.1 to 127.0.0.254: give another address of \
             127.0.0.0/8 with INCCL_BIND"
        );
        Err(Failure::new(codes::DEVICE, text))
    }
}

fn open(address: IpAddr, provider: Option<Provider>) -> Result<Device, DeviceError> {
    Device::open_chosen(&DeviceConfig::new(DeviceChoice::Address(address, provider))?)
}

/// What distinguishes a job from others.
fn job(
    variable: impl Fn(&str) -> Result<Option<String>, Failure>,
) -> Result<Option<String>, Failure> {
    if let Some(job) = variable("INCCL_JOB")? {
        return Ok(Some(job));
    }
    for names in JOBS {
        let values = names.iter().map(|name| variable(name));
        let values = values.collect::<Result<Option<Vec<String>>, Failure>>()?;
        if let Some(values) = values {
            return Ok(Some(values.join(".")));
        }
    }
    Ok(None)
}

fn timeout(
    said: u32,
    name: &str,
    variable: impl Fn(&str) -> Result<Option<String>, Failure>,
) -> Result<Option<Duration>, Failure> {
    if said > 0 {
        return Ok(Some(Duration::from_millis(said.into())));
    }
    let Some(value) = variable(name)? else { return Ok(None) };
    match value.parse::<u32>() {
        Ok(milliseconds @ 1..) => Ok(Some(Duration::from_millis(milliseconds.into()))),
        _ => Err(argument(format!(
            "{name}: {value:?} is no number of milliseconds from 1 to {}",
            u32::MAX
        ))),
    }
}

/// The files of TLS, if there is to be TLS.
fn tls(
    variable: impl Fn(&str) -> Result<Option<String>, Failure>,
) -> Result<Option<CallerFiles>, Failure> {
    let file = |name: &str| Ok::<_, Failure>(variable(name)?.map(PathBuf::from));
    let alone = |set: &str, missing: &str| argument(format!("{set} is set, and {missing} is not"));
    let own = match (file("INCCL_TLS_CERTIFICATE")?, file("INCCL_TLS_KEY")?) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(_), None) => return Err(alone("INCCL_TLS_CERTIFICATE", "INCCL_TLS_KEY")),
        (None, Some(_)) => return Err(alone("INCCL_TLS_KEY", "INCCL_TLS_CERTIFICATE")),
    };
    match (file("INCCL_TLS_CA")?, own) {
        (Some(authorities), own) => Ok(Some(CallerFiles { authorities, own })),
        (None, None) => Ok(None),
        // Without authorities nobody would vouch for the controller.
        (None, Some(_)) => Err(alone("INCCL_TLS_CERTIFICATE", "INCCL_TLS_CA")),
    }
}

/// The host of a controller, or of the first of several: a name is that of all of them.
fn host(controllers: &str) -> &str {
    let first = controllers.split(',').next().unwrap_or_default();
    if first.parse::<IpAddr>().is_ok() {
        return first;
    }
    let host = match first.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => host,
        _ => first,
    };
    host.trim_start_matches('[').trim_end_matches(']')
}

/// What is tried: the addresses of a host by themselves, or several controllers with commas between together.
fn controllers(text: &str) -> Result<Vec<Controllers>, Failure> {
    if !text.contains(',') {
        return Ok(resolve(text)?.into_iter().map(Controllers::from).collect());
    }
    let first = |text: &str| resolve(text).map(|found| found[0]);
    let all: Vec<SocketAddr> = text.split(',').map(first).collect::<Result<_, _>>()?;
    let all = Controllers::new(all).map_err(|error| argument(format!("{text:?}: {error}")))?;
    Ok(vec![all])
}

/// The addresses of a host, or of `HOST:PORT`. An address of version 6 with a port stands in brackets.
fn resolve(text: &str) -> Result<Vec<SocketAddr>, Failure> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, DEFAULT_PORT)]);
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(vec![address]);
    }
    let with_port = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = with_port.unwrap_or((text, DEFAULT_PORT));
    let unknown = |why: String| {
        argument(format!(
            "{text:?} is not the address of a controller{why}: write an address or a host name, and a port \
             behind a colon unless it is {DEFAULT_PORT}"
        ))
    };
    let mut found = millstream_net::lookup(host).map_err(|error| unknown(format!(" ({error})")))?;
    found.iter_mut().for_each(|address| address.set_port(port));
    if found.is_empty() { Err(unknown(String::new())) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(said: &Said<'_>, variables: &[(&str, &str)]) -> Result<Settings, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        };
        Settings::with(said, variable).map_err(|failure| failure.text().to_owned())
    }

    const SAID: Said<'_> = Said {
        controller: Some("10.0.0.1"),
        group: None,
        bind: None,
        join_timeout_ms: 0,
        call_timeout_ms: 0,
    };

    #[test]
    fn where_the_controller_is() {
        for (text, address) in [
            ("10.0.0.1", "10.0.0.1:52200"),
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("::1", "[::1]:52200"),
            ("[::1]:7", "[::1]:7"),
            ("127.1:7", "127.0.0.1:7"),
        ] {
            let address: SocketAddr = address.parse().unwrap();
            let said = Said { controller: Some(text), ..SAID };
            let controllers = [Controllers::from(address)];
            assert_eq!(with(&said, &[]).unwrap().controllers, controllers, "{text}");
        }
        let ports =
            |text| -> Vec<u16> { resolve(text).unwrap().into_iter().map(|it| it.port()).collect() };
        for (text, port) in [("localhost", DEFAULT_PORT), ("localhost:7", 7)] {
            let found = ports(text);
            assert!(!found.is_empty() && found.iter().all(|&it| it == port), "{text}: {found:?}");
        }
        let environment = [("INCCL_CONTROLLER", "10.0.0.2:8")];
        for controller in [None, Some("")] {
            let said = Said { controller, ..SAID };
            let found = with(&said, &environment).unwrap().controllers;
            let address: SocketAddr = "10.0.0.2:8".parse().unwrap();
            assert_eq!(found, [Controllers::from(address)]);
            assert!(with(&said, &[]).unwrap_err().contains("INCCL_CONTROLLER"));
        }
        let said = Said { controller: Some("10.0.0.1,10.0.0.2:7"), ..SAID };
        let found = with(&said, &[]).unwrap().controllers;
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.1:52200,10.0.0.2:7"]);
        let said = Said { controller: Some("10.0.0.1,:7"), ..SAID };
        assert!(with(&said, &[]).unwrap_err().contains("\":7\""));
        for text in ["10.0.0.1:99999", "10.0.0.1:", "a b", ":7"] {
            let error = with(&Said { controller: Some(text), ..SAID }, &[]).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_group_is_that_of_the_caller_of_the_environment_or_the_default_one_and_of_the_job() {
        let group = |said: Option<&str>, variables: &[(&str, &str)]| {
            with(&Said { group: said, ..SAID }, variables).unwrap().group
        };
        assert_eq!(group(None, &[]), "default");
        assert_eq!(group(None, &[("INCCL_GROUP", "a")]), "a");
        assert_eq!(group(Some("b"), &[("INCCL_GROUP", "a")]), "b");
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")];
        assert_eq!(group(None, &slurm), "default@7.0");
        assert_eq!(group(None, &slurm[..1]), "default");
        assert_eq!(group(None, &[slurm[0], slurm[1], ("INCCL_JOB", "x")]), "default@x");
    }

    #[test]
    fn the_token_is_in_a_file_that_the_environment_names() {
        assert_eq!(with(&SAID, &[]).unwrap().token_file, None);
        let environment = [("INCCL_TOKEN_FILE", "/etc/token")];
        let file = with(&SAID, &environment).unwrap().token_file;
        assert_eq!(file.as_deref(), Some(std::path::Path::new("/etc/token")));
    }

    #[test]
    fn files_of_tls_go_together_and_the_certificate_is_for_the_host_that_is_named() {
        assert_eq!(with(&SAID, &[]).unwrap().tls, None);
        let [ca, certificate, key] =
            ["INCCL_TLS_CA", "INCCL_TLS_CERTIFICATE", "INCCL_TLS_KEY"].map(|it| (it, "f"));
        let tls = |variables: &[(&str, &str)]| with(&SAID, variables).map(|it| it.tls.unwrap());
        let own = Some(("f".into(), "f".into()));
        let authorities = PathBuf::from("f");
        assert_eq!(
            tls(&[ca, certificate, key]),
            Ok(CallerFiles { authorities: authorities.clone(), own })
        );
        assert_eq!(tls(&[ca]), Ok(CallerFiles { authorities, own: None }));
        for (variables, missing) in
            [(&[ca, certificate][..], key), (&[ca, key], certificate), (&[certificate, key], ca)]
        {
            let error = tls(variables).unwrap_err();
            assert!(error.contains(&format!("and {} is not", missing.0)), "{error}");
        }
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1"),
            ("10.0.0.1:7,10.0.0.2", "10.0.0.1"),
            ("localhost:7", "localhost"),
            ("localhost", "localhost"),
            ("fd00::1", "fd00::1"),
            ("[fd00::1]:7", "fd00::1"),
        ] {
            assert_eq!(host(text), expected);
        }
    }

    #[test]
    fn results_depend_on_the_order_of_arrival_unless_the_environment_says_otherwise() {
        let reproducible =
            |value| with(&SAID, &[("INCCL_REPRODUCIBLE", value)]).unwrap().reproducible;
        assert_eq!(["0", "1"].map(reproducible), [false, true]);
        assert!(!with(&SAID, &[]).unwrap().reproducible);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (name, value) in [
            ("INCCL_BIND", "eth0"),
            ("INCCL_JOIN_TIMEOUT_MS", "0"),
            ("INCCL_CALL_TIMEOUT_MS", "-1"),
            ("INCCL_CALL_TIMEOUT_MS", "1s"),
            ("INCCL_PATH", "fast"),
            ("INCCL_REPRODUCIBLE", "yes"),
            ("INCCL_FALLBACK", "never"),
            ("INCCL_KEEP_OVERWRITTEN", "0"),
        ] {
            let error = with(&SAID, &[(name, value)]).unwrap_err();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
        let two = with(&SAID, &[("INCCL_BIND", "10.0.0.2,fd00::2")]).unwrap().bind;
        assert_eq!(two, ["10.0.0.2", "fd00::2"].map(|it| it.parse::<IpAddr>().unwrap()));
        assert!(with(&SAID, &[("INCCL_BIND", "10.0.0.2,")]).unwrap_err().contains("\"\""));
        let said = Said { bind: Some("eth1"), ..SAID };
        let error = with(&said, &[("INCCL_BIND", "10.0.0.2")]).unwrap_err();
        assert!(error.starts_with("bind: \"eth1\""), "{error}");
        let patience = [("INCCL_JOIN_TIMEOUT_MS", "5")];
        let settings = with(&Said { call_timeout_ms: 9, ..SAID }, &patience).unwrap();
        let both = (settings.join_timeout, settings.call_timeout);
        assert_eq!(both, (Some(Duration::from_millis(5)), Some(Duration::from_millis(9))));
        assert_eq!(settings.path, Path::Auto);
        let paths = Path::ALL.map(|path| with(&SAID, &[("INCCL_PATH", path.name())]).unwrap().path);
        assert_eq!(paths, Path::ALL);
        let falls_back = |value| with(&SAID, &[("INCCL_FALLBACK", value)]).unwrap().fallback;
        assert_eq!((settings.fallback, falls_back("on"), falls_back("off")), (true, true, false));
        let keeps =
            |value| with(&SAID, &[("INCCL_KEEP_OVERWRITTEN", value)]).unwrap().keep_overwritten;
        assert_eq!((settings.keep_overwritten, keeps("on"), keeps("off")), (true, true, false));
    }
}
