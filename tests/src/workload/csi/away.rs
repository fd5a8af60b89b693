//! The daemon is away for several probe periods, first dead and then hung, while the plugin is
//! probed as the kubelet probes it with the shipped manifest. The plugin stays alive and keeps its
//! process, it is not ready, and it becomes ready when the daemon is back.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::ProbeRequest;
use blockd_testkit::clock::Clock;
use blockd_testkit::tools;
use nix::sys::signal::Signal;

use super::life::{Shape, Volume};
use super::node::PATIENCE;
use crate::csi::Driver;
use crate::csi::rig::{Plugin, Rig};
use crate::workload::{Form, guest};

/// The source of probe periods and timeouts.
const MANIFEST: &str = include_str!("../../../../deploy/kubernetes/daemonset.yaml");
/// The content of the volume that stays published.
const TEXT: &[u8] = b"written before the daemon went away";
const MIB: i64 = 1 << 20;

/// How the daemon is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outage {
    Dead,
    Hung,
}

/// A probe of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probe {
    period: Duration,
    /// A later answer counts as a failure.
    timeout: Duration,
    /// Failures in a row until the kubelet acts.
    failures: u32,
}

/// The probes of a run, and its length.
#[derive(Clone, Copy, Debug)]
struct Plan {
    liveness: Probe,
    readiness: Probe,
    /// Timeout of the call Probe in the sidecar that serves the readiness probe.
    call: Duration,
    /// Length of each outage.
    away: Duration,
}

/// Answers of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    alive: u32,
    not_ready: u32,
}

impl Plan {
    /// The shipped probes. All forms but the long one shorten periods. Timeouts stay as shipped,
    /// because a machine may be slow.
    fn new(form: Form) -> Result<Self> {
        let (divisor, periods) = match form {
            Form::Short => (20, 6),
            Form::Default => (10, 6),
            // Two outages of ten periods of 30 s each are ten minutes.
            Form::Long => (1, 10),
        };
        let probe = |name| -> Result<Probe> {
            let seconds = |key| shipped(&format!("{name}:"), &format!("{key}: "));
            Ok(Probe {
                period: Duration::from_secs(seconds("periodSeconds")?) / divisor,
                timeout: Duration::from_secs(seconds("timeoutSeconds")?),
                failures: u32::try_from(seconds("failureThreshold")?)?,
            })
        };
        let (liveness, readiness) = (probe("livenessProbe")?, probe("readinessProbe")?);
        let call = Duration::from_secs(shipped("--csi-address", "--probe-timeout=")?);
        ensure!(call < readiness.timeout, "{call:?} is not below {:?}", readiness.timeout);
        let away = liveness.period * periods;
        let restart = liveness.period * liveness.failures;
        ensure!(away > restart, "an outage of {away:?} ends before a restart after {restart:?}");
        Ok(Self { liveness, readiness, call, away })
    }
}

/// The number that follows `key` in the manifest, after the text `after`.
fn shipped(after: &str, key: &str) -> Result<u64> {
    let rest = MANIFEST.split_once(after).map(|(_, rest)| rest);
    let value = rest.and_then(|rest| rest.split_once(key)).map(|(_, value)| value);
    let digits = value.map(|value| value.chars().take_while(char::is_ascii_digit).collect());
    let digits: String = digits.with_context(|| format!("no {key} after {after}"))?;
    Ok(digits.parse()?)
}

/// Runs both outages with a published volume. Returns figures.
///
/// # Errors
/// When the plugin is not alive or is restarted, when it is ready without its daemon or not ready
/// with it, or when the volume loses its content.
pub(super) fn all(rig: &mut Rig, form: Form) -> Result<String> {
    let start = Clock::start();
    let plan = Plan::new(form)?;
    let driver = rig.plugin.driver()?;
    let mut volume = Volume::new(rig, "away", Shape::Block, 16 * MIB)?;
    volume.create(&driver)?;
    volume.stage(&driver)?;
    volume.publish(&driver, 0)?;
    let device = File::options().read(true).write(true).open(volume.target(0))?;
    device.write_all_at(TEXT, 0)?;
    device.sync_all()?;
    let process = process(&rig.plugin)?;
    let mut sum = Counts::default();
    for outage in [Outage::Dead, Outage::Hung] {
        match outage {
            Outage::Dead => rig.daemon.kill()?,
            Outage::Hung => rig.daemon.freeze()?,
        }
        let counted = probe(&rig.plugin, &plan, outage, &volume);
        // Before an error is returned: cleanup would wait for a stopped process.
        match outage {
            Outage::Dead => rig.daemon.start().map(drop)?,
            Outage::Hung => rig.daemon.signal(Signal::SIGCONT)?,
        }
        let counts = counted.with_context(|| format!("{outage:?}; {}", rig.plugin.last_words()))?;
        sum.alive += counts.alive;
        sum.not_ready += counts.not_ready;
        let client = rig.plugin.client(plan.call)?;
        let ready = || is_ready(&client).then_some(());
        tools::wait_until("the plugin to be ready again", PATIENCE, ready)
            .with_context(|| format!("{outage:?}; {}", rig.plugin.last_words()))?;
        ensure!(self::process(&rig.plugin)? == process, "{outage:?}: the plugin was restarted");
        guest::shell("echo 3 >/proc/sys/vm/drop_caches")?;
        let mut content = [0; TEXT.len()];
        device.read_exact_at(&mut content, 0)?;
        ensure!(content == TEXT, "{outage:?}: the volume has other content");
    }
    drop(device);
    volume.unpublish(&driver, 0)?;
    volume.unstage(&driver)?;
    volume.delete(&driver)?;
    volume.gone()?;
    let Counts { alive, not_ready } = sum;
    println!("an absent daemon: ok, {:.1} s", start.elapsed().as_secs_f64());
    Ok(format!(
        "{alive} liveness probes passed and {not_ready} readiness probes failed in {} s without \
         the daemon",
        (plan.away * 2).as_secs()
    ))
}

/// Process id and start time of the plugin.
fn process(plugin: &Plugin) -> Result<(u32, String)> {
    let pid = plugin.pid().context("the plugin does not run")?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("the plugin has ended")?;
    // The name in parentheses may hold any character. The start time is field 22, the state after
    // the name is field 3.
    let rest = stat.rsplit_once(')').context("no name in the process status")?.1;
    let start = rest.split_ascii_whitespace().nth(19).context("no start time")?;
    Ok((pid, start.to_owned()))
}

/// Runs both probes side by side for the length of an outage.
fn probe(plugin: &Plugin, plan: &Plan, outage: Outage, volume: &Volume) -> Result<Counts> {
    let start = Clock::start();
    let failed = AtomicBool::new(false);
    let goes_on = || start.elapsed() < plan.away && !failed.load(Ordering::Relaxed);
    let (alive, not_ready) = std::thread::scope(|scope| {
        let liveness = scope.spawn(|| {
            let result = probe_liveness(plugin, &plan.liveness, goes_on);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        });
        let result = probe_readiness(plugin, plan, outage, volume, goes_on);
        failed.fetch_or(result.is_err(), Ordering::Relaxed);
        (liveness.join(), result)
    });
    let alive = alive.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    Ok(Counts { alive, not_ready: not_ready? })
}

/// Fails unless each answer is a 200, and unless the kubelet would leave the plugin running.
/// Returns the number of answers.
fn probe_liveness(plugin: &Plugin, probe: &Probe, goes_on: impl Fn() -> bool) -> Result<u32> {
    let (mut count, mut late) = (0, 0);
    while goes_on() || count < probe.failures {
        let asked = Clock::start();
        plugin.alive().with_context(|| format!("liveness after {count} answers"))?;
        count += 1;
        late = if asked.elapsed() > probe.timeout { late + 1 } else { 0 };
        ensure!(late < probe.failures, "{late} answers in a row were late");
        sleep_until(asked, probe.period);
    }
    Ok(count)
}

/// Fails if the plugin reports that it is ready. Returns the number of answers. Beside each
/// probe a call goes to the plugin that needs the daemon.
fn probe_readiness(
    plugin: &Plugin,
    plan: &Plan,
    outage: Outage,
    volume: &Volume,
    goes_on: impl Fn() -> bool,
) -> Result<u32> {
    let limit = match outage {
        Outage::Dead => plan.call,
        // The call may time out, which means not ready, so a shorter timeout cannot fail the run.
        Outage::Hung => plan.call.min(plan.readiness.period.max(Duration::from_secs(1))),
    };
    let client = plugin.client(limit)?;
    let mut count = 0;
    while goes_on() || count < plan.readiness.failures {
        let asked = Clock::start();
        match (client.probe(ProbeRequest {}), outage) {
            (Ok(answer), _) => ensure!(answer.ready == Some(false), "{answer:?}"),
            (Err(_), Outage::Hung) => {}
            (Err(status), Outage::Dead) => bail!("Probe failed: {status}"),
        }
        count += 1;
        let _ = volume.stats(&client, 0);
        sleep_until(asked, plan.readiness.period);
    }
    Ok(count)
}

fn is_ready(client: &Driver) -> bool {
    client.probe(ProbeRequest {}).is_ok_and(|answer| answer.ready == Some(true))
}

/// Sleeps until a period after `since` is over.
fn sleep_until(since: Clock, period: Duration) {
    std::thread::sleep(period.saturating_sub(since.elapsed()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_come_from_the_manifest_and_the_long_form_takes_ten_minutes() {
        let long = Plan::new(Form::Long).unwrap();
        assert_eq!(long.liveness.period, Duration::from_secs(30));
        assert_eq!((long.liveness.failures, long.readiness.failures), (5, 3));
        assert_eq!(long.readiness.period, Duration::from_secs(10));
        assert_eq!((long.call, long.away * 2), (Duration::from_secs(5), Duration::from_secs(600)));
        let short = Plan::new(Form::Short).unwrap();
        assert!(short.away * 2 <= Duration::from_secs(20), "{short:?}");
        assert_eq!(short.liveness.timeout, Duration::from_secs(10));
    }
}
