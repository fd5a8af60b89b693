//! `blockd health`.

use std::collections::BTreeMap;
use std::time::Duration;

use blockd_api::v1::{AcknowledgeHealthRequest, Cause, HealthRequest, Severity};
use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::units::counted;
use serde::Serialize;

use super::answers::date;
use super::output::table::{Cell, Side, Table};
use super::output::terminal::Tone;
use super::{Context, client};

/// The interval of `--watch`: that of the daemon's own looks.
const WATCH: Duration = Duration::from_secs(1);

/// Show what is wrong with pools and volumes
///
/// Prints the severity of each cause (failure, warning, or unknown), its first time and its
/// message. A cause of a pool is printed once, with the number of affected volumes; for a named
/// volume, all of its causes are printed. The daemon answers from memory and reads nothing.
/// OPERATIONS.md explains each code and its remedy.
///
/// The exit code is 0 in any state of health. With --check it is 7 if there is a cause.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd health\n  blockd health default/data --check")]
pub(crate) struct Health {
    /// Pools, and volumes as POOL/VOLUME; /VOLUME is one of the default pool [default: all]
    #[arg(value_name = "POOL[/VOLUME]")]
    pub which: Vec<String>,

    /// Go on, and print what begins and ends; also when the daemon is started anew
    #[arg(long, conflicts_with_all = ["check", "acknowledge"])]
    pub watch: bool,

    /// End with exit code 7 when anything is wrong
    #[arg(long)]
    pub check: bool,

    /// Acknowledge the IO errors up to now, so that they are not reported again
    #[arg(long)]
    pub acknowledge: bool,
}

/// The output of `--json`.
#[derive(Debug, Default, Serialize)]
struct HealthShape {
    healthy: bool,
    severity: Option<&'static str>,
    pools: Vec<SubjectShape>,
    volumes: Vec<SubjectShape>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct SubjectShape {
    pool: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<String>,
    healthy: bool,
    severity: Option<&'static str>,
    last_probe_unix_ms: i64,
    last_transition_unix_ms: Option<i64>,
    causes: Vec<Cause>,
}

/// A line of the output of `--watch --json`.
#[derive(Debug, Serialize)]
struct ChangeShape<'a> {
    time_unix_ms: i64,
    /// began, changed, ended; lost and found, for the daemon.
    change: &'static str,
    pool: Option<&'a str>,
    volume: Option<&'a str>,
    cause: Option<&'a Cause>,
}

/// A pool or a volume, as it is named.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Place {
    pool: String,
    volume: String,
}

impl Place {
    fn parse(text: &str) -> Result<Self, Error> {
        let (pool, volume) = text.split_once('/').unwrap_or((text, ""));
        if text.is_empty() || text.ends_with('/') || volume.contains('/') {
            return Err(Error::invalid("POOL[/VOLUME]", text, "a pool, POOL/VOLUME or /VOLUME"));
        }
        Ok(Self { pool: pool.to_owned(), volume: volume.to_owned() })
    }
}

impl Health {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let places: Result<Vec<Place>, Error> =
            self.which.iter().map(|text| Place::parse(text)).collect();
        let mut places = places?;
        let named = !places.is_empty();
        if places.is_empty() {
            places.push(Place::default());
        }
        let mut client = context.client().await?;
        if self.watch {
            return watch(context, &mut client, &places).await;
        }
        if self.acknowledge {
            for Place { pool, volume } in places.clone() {
                client.acknowledge_health(AcknowledgeHealthRequest { pool, volume }).await?;
            }
        }
        let report = ask(&mut client, &places).await?;
        let bad = report.pools.iter().chain(&report.volumes).filter(|one| !one.healthy).count();
        if context.output.is_json() {
            context.output.last_json(&report)?;
        } else {
            context.output.text(&text(&report, named, context))?;
        }
        if self.check && bad > 0 {
            let all = report.pools.len() + report.volumes.len();
            let what = format!("{bad} of {all} pools and volumes");
            let verb = if bad == 1 { "is" } else { "are" };
            return Err(Error::in_use(what, format!("{verb} not healthy")));
        }
        Ok(())
    }
}

async fn ask(client: &mut client::Client, places: &[Place]) -> Result<HealthShape, Error> {
    let mut report = HealthShape::default();
    for Place { pool, volume } in places.iter().cloned() {
        let request = HealthRequest { pool, volume, abnormal_only: false };
        let answer = client.health(request).await?;
        for one in answer.pools {
            report.pools.push(SubjectShape {
                pool: one.pool,
                volume: None,
                ..subject(
                    one.severity,
                    one.causes,
                    [one.last_probe_unix_ms, one.last_transition_unix_ms],
                )
            });
        }
        for one in answer.volumes {
            report.volumes.push(SubjectShape {
                pool: one.pool,
                volume: Some(one.volume),
                ..subject(
                    one.severity,
                    one.causes,
                    [one.last_probe_unix_ms, one.last_transition_unix_ms],
                )
            });
        }
    }
    let worst = report.pools.iter().chain(&report.volumes).filter_map(|one| one.severity);
    report.severity = worst.max_by_key(|name| rank(name));
    report.healthy = report.severity.is_none();
    Ok(report)
}

fn subject(severity: i32, causes: Vec<Cause>, [probe, transition]: [i64; 2]) -> SubjectShape {
    let severity = Severity::try_from(severity).unwrap_or_default();
    SubjectShape {
        pool: String::new(),
        volume: None,
        healthy: severity == Severity::Unspecified,
        severity: severity.word(),
        last_probe_unix_ms: probe,
        last_transition_unix_ms: Some(transition).filter(|&at| at > 0),
        causes,
    }
}

/// A table of causes, or that there are none.
fn text(report: &HealthShape, named: bool, context: &Context) -> String {
    let all = [(report.pools.len(), "pool"), (report.volumes.len(), "volume")];
    let all = all.map(|(count, what)| counted(count, what)).join(" and ");
    let is_looked_at = |one: &SubjectShape| one.last_probe_unix_ms > 0;
    if !report.pools.iter().chain(&report.volumes).any(is_looked_at) {
        return format!("unknown: {all}; health checks are disabled (health.enabled = false)\n");
    }
    if report.healthy {
        let good = context.output.paint().text(Tone::Good, "healthy");
        return format!("{good}: {all}\n");
    }
    let mut table = Table::new(&[
        ("pool or volume", Side::Left),
        ("severity", Side::Left),
        ("code", Side::Left),
        ("since", Side::Left),
        ("what", Side::Left),
    ]);
    let mut touched = 0;
    for one in report.pools.iter().chain(&report.volumes) {
        // The pool's causes are printed once, unless only volumes were named.
        let in_full = named && report.pools.is_empty();
        let shown = one.causes.iter().filter(|cause| in_full || !cause.of_pool);
        let before = touched;
        touched += usize::from(one.causes.iter().any(|cause| cause.of_pool));
        if in_full {
            touched = before;
        }
        for cause in shown {
            let severity = severity_word(cause);
            table.row([
                place(one).into(),
                Cell::toned(severity, tone(severity)),
                cause.code().word().into(),
                date(cause.first_seen_unix_ms).into(),
                cause.message.as_str().into(),
            ]);
        }
    }
    let mut text = table.render(context.output.terminal());
    if touched > 0 {
        let touched = counted(touched, "volume");
        text.push_str(&format!("what is wrong with pools touches {touched} of {all}\n"));
    }
    text
}

fn place(one: &SubjectShape) -> String {
    match &one.volume {
        Some(volume) => format!("{}/{}", shown(&one.pool), shown(volume)),
        None => shown(&one.pool),
    }
}

/// The key by which a cause is recognised from one look to the next.
type Key = (String, Option<String>, String, String);

/// Prints the causes that begin, change and end, until the output is closed.
async fn watch(
    context: &Context,
    client: &mut client::Client,
    places: &[Place],
) -> Result<(), Error> {
    let mut before: BTreeMap<Key, Cause> = BTreeMap::new();
    let (mut is_there, mut first) = (true, true);
    loop {
        match ask(client, places).await {
            Ok(report) => {
                // Also at the beginning, so that its reader knows the start of the watch.
                if !is_there || (first && context.output.is_json()) {
                    change(context, "found", None, None)?;
                }
                is_there = true;
                if first && report.healthy && !context.output.is_json() {
                    context.output.text(&text(&report, false, context))?;
                }
                first = false;
                let now = own_causes(report, places);
                print_changes(context, &before, &now)?;
                before = now;
            }
            Err(error) if error.kind() == ErrorKind::Unreachable && !first => {
                if is_there {
                    change(context, "lost", None, None)?;
                }
                is_there = false;
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(WATCH).await;
    }
}

/// The causes of all that were asked for; those of pools once.
fn own_causes(report: HealthShape, places: &[Place]) -> BTreeMap<Key, Cause> {
    let in_full = places.iter().any(|place| !place.volume.is_empty());
    let mut all = BTreeMap::new();
    for one in report.pools.into_iter().chain(report.volumes) {
        for cause in one.causes {
            if in_full || !cause.of_pool {
                let (code, device) = (cause.code().word(), cause.device.clone());
                all.insert((one.pool.clone(), one.volume.clone(), code, device), cause);
            }
        }
    }
    all
}

fn print_changes(
    context: &Context,
    before: &BTreeMap<Key, Cause>,
    now: &BTreeMap<Key, Cause>,
) -> Result<(), Error> {
    for (key, cause) in now {
        match before.get(key) {
            None => change(context, "began", Some(key), Some(cause))?,
            Some(earlier) if earlier.severity != cause.severity => {
                change(context, "changed", Some(key), Some(cause))?;
            }
            Some(_) => {}
        }
    }
    for (key, cause) in before.iter().filter(|(key, _)| !now.contains_key(*key)) {
        change(context, "ended", Some(key), Some(cause))?;
    }
    Ok(())
}

fn change(
    context: &Context,
    change: &'static str,
    key: Option<&Key>,
    cause: Option<&Cause>,
) -> Result<(), Error> {
    let time_unix_ms = wall_ms();
    if context.output.is_json() {
        return context.output.json_line(&ChangeShape {
            time_unix_ms,
            change,
            pool: key.map(|key| key.0.as_str()),
            volume: key.and_then(|key| key.1.as_deref()),
            cause,
        });
    }
    let paint = context.output.paint();
    let time = paint.text(Tone::Dim, &date(time_unix_ms));
    let line = match (cause, change) {
        (Some(cause), "ended") => {
            format!("{}: {}", paint.text(Tone::Good, "ended"), cause.message)
        }
        (Some(cause), _) => {
            let severity = severity_word(cause);
            let severity = paint.text(tone(severity), severity);
            format!("{severity}: {}: {}", cause.code().word(), cause.message)
        }
        (None, "lost") => paint.text(Tone::Warning, "the daemon does not answer"),
        (None, _) => paint.text(Tone::Good, "the daemon answers"),
    };
    context.output.text(&format!("{time}  {line}\n"))
}

fn severity_word(cause: &Cause) -> &'static str {
    cause.severity().word().unwrap_or("unknown")
}

fn tone(severity: &str) -> Tone {
    match severity {
        "failure" => Tone::Bad,
        "warning" => Tone::Warning,
        _ => Tone::Strong,
    }
}

fn rank(severity: &str) -> usize {
    ["unknown", "warning", "failure"].iter().position(|name| *name == severity).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use blockd_api::v1::HealthCode;

    use super::*;

    fn errors() -> Cause {
        Cause {
            code: HealthCode::IoErrors.into(),
            severity: Severity::Failure.into(),
            message: "3 reads failed".to_owned(),
            count: 3,
            first_seen_unix_ms: 1,
            last_probe_unix_ms: 3,
            last_transition_unix_ms: 2,
            reason: "media".to_owned(),
            ..Default::default()
        }
    }

    /// Row: H40.
    #[test]
    fn the_json_has_severity_code_reason_and_all_times() {
        let shape = subject(Severity::Failure.into(), vec![errors()], [3, 2]);
        let shape = SubjectShape { pool: "p".to_owned(), volume: Some("v".to_owned()), ..shape };
        let expected = concat!(
            r#"{"pool":"p","volume":"v","healthy":false,"severity":"failure","#,
            r#""last_probe_unix_ms":3,"last_transition_unix_ms":2,"causes":[{"#,
            r#""code":"io-errors","severity":"failure","reason":"media","#,
            r#""message":"3 reads failed","device":null,"count":3,"of_pool":false,"#,
            r#""first_seen_unix_ms":1,"last_probe_unix_ms":3,"last_transition_unix_ms":2}]}"#
        );
        assert_eq!(serde_json::to_string(&shape).unwrap(), expected);
    }

    #[test]
    fn a_pool_and_a_volume_are_distinguished() {
        let place =
            |pool: &str, volume: &str| Place { pool: pool.to_owned(), volume: volume.to_owned() };
        assert_eq!(Place::parse("p").unwrap(), place("p", ""));
        assert_eq!(Place::parse("p/v").unwrap(), place("p", "v"));
        assert_eq!(Place::parse("/v").unwrap(), place("", "v"));
        for bad in ["", "/", "p/", "p/v/w"] {
            assert!(Place::parse(bad).is_err(), "{bad}");
        }
    }
}
