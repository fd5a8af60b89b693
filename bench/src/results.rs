//! Charts of saved results: one for each claim group, a part of a bench whose claims have the same
//! kind of figure and the same servers.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::chart::{Bar, Chart};
use crate::counts::Target;
use crate::stats::Ratio;
use crate::ublk::Mode;

/// Claim groups and the titles of their charts.
const GROUPS: [(&str, &str); 19] = [
    ("nbd-tmpfs", "NBD, a file on tmpfs: blockd beside the best server"),
    ("nbd-memory", "NBD, memory: blockd beside the best server"),
    ("nbd-disk", "NBD, a file on a disk: blockd beside the best server"),
    ("nbd-first-touch", "NBD, first writes to extents: blockd beside overwrites and qcow2"),
    ("nbd-after-snapshot", "NBD, first writes after snapshots, and reads: blockd beside itself"),
    ("nbd-pmem", "NBD, persistent memory, blocks never torn: blockd beside the best server"),
    ("nbd-pmem-torn", "NBD, persistent memory, blocks may be torn: blockd beside the best server"),
    ("nbd-budgets", "NBD: counts and memory of blockd, as parts of their limits"),
    ("ublk-mapped", "ublk, blocks that were written before: blockd beside rublk's loop"),
    ("ublk-first-touch", "ublk, first writes to extents: blockd beside overwrites and dm-thin"),
    ("ublk-after-snapshot", "ublk, first writes after snapshots: blockd beside itself and dm-thin"),
    ("ublk-counts", "ublk, calls of io_uring_enter: blockd beside rublk's loop"),
    ("ublk-budgets", "ublk: counts and pauses of blockd, as parts of their limits"),
    ("ublk-pmem-mapped", "ublk, persistent memory: blockd beside rublk's loop"),
    ("counts-nbd", "Instructions of an operation over NBD: blockd beside the best server"),
    ("counts-ublk", "Instructions of an operation of ublk: blockd beside rublk's loop"),
    ("counts-first-writes", "Instructions of a first write: blockd beside its overwrite"),
    ("mapper-budgets", "Mapper: times, memory and counts, as parts of their limits"),
    ("device", "A disk by itself, and blockd on it"),
];

/// How a chart is read, by the direction of its ratios.
const MORE: &str = "Ratios; more is better. Whiskers: 90 % interval. Dashed: target.";
const LESS: &str = "Ratios; less is better. Dashed: the most that is aimed at, if not 1.";

/// How many times as many instructions blockd may need as rublk's loop, by mode, and a first write
/// as an overwrite, with zero copy at depth 32.
const AIMS: [(Mode, f64); 2] = [(Mode::Copy, 1.10), (Mode::ZeroCopy, 1.15)];
const AIM_OF_FIRST_WRITE: (&str, f64) = ("ublk zero copy first write 4k, 32", 1.11);

/// The name of the daemon among servers.
const OURS: &str = "blockd";

/// Writes the charts of results into a folder, and prints their paths.
///
/// # Errors
/// When the results have no claim, or a file can't be written.
pub fn write(results: &Value, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    for chart in charts(results)? {
        let path = folder.join(format!("{}.svg", chart.name));
        std::fs::write(&path, chart.svg()).with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

/// The charts of the results of one bench.
///
/// # Errors
/// When the results are of no known bench, or have no claim.
pub fn charts(results: &Value) -> Result<Vec<Chart>> {
    let mut groups = Groups { results, charts: Vec::new() };
    match bench(results)? {
        "counts" => groups.add_counts(),
        "device" => groups.add_device(),
        bench => {
            groups.add_claims(bench);
            groups.add_budgets(bench);
        }
    }
    ensure!(!groups.charts.is_empty(), "cannot draw charts: the results have no claim");
    Ok(groups.charts)
}

/// Returns the bench that wrote the results. They do not name it, but each has a member that others
/// lack.
fn bench(results: &Value) -> Result<&'static str> {
    let has = |name: &str| !results[name].is_null();
    Ok(if has("front_end") {
        "device"
    } else if has("mapped") {
        // On persistent memory the engine of fio is not a choice.
        if has("engine") { "ublk" } else { "ublk-pmem" }
    } else if has("workloads") {
        "nbd"
    } else if has("rows") && has("machine") {
        "mapper"
    } else if has("rows") {
        "counts"
    } else {
        bail!("cannot draw charts: not the results of a bench that has claims")
    })
}

struct Groups<'a> {
    results: &'a Value,
    charts: Vec<Chart>,
}

impl Groups<'_> {
    /// Adds a bar to the chart of a group, which begins with its first bar.
    fn add(&mut self, name: &str, direction: &str, pairs: Option<u64>, bar: Bar) {
        if let Some(chart) = self.charts.iter_mut().find(|chart| chart.name == name) {
            chart.bars.push(bar);
            return;
        }
        let title =
            GROUPS.iter().find(|(group, _)| *group == name).map_or(name, |(_, title)| *title);
        let (name, title) = (name.to_owned(), title.to_owned());
        let notes = [direction.to_owned(), run(self.results, pairs)];
        let notes = notes.into_iter().filter(|note| !note.is_empty()).collect();
        self.charts.push(Chart { name, title, notes, bars: vec![bar] });
    }

    /// Ratios that have to reach a target. The group is the workload's name up to its slash.
    fn add_claims(&mut self, bench: &str) {
        for claim in list(&self.results["claims"]) {
            let (workload, of) = (text(claim, "workload"), text(claim, "claim"));
            let (group, label) = match workload.split_once('/') {
                Some((group, rest)) => (group, format!("{rest}: {of}")),
                None => (workload, of.to_owned()),
            };
            let ratio = &claim["ratio"];
            let [median, low, high] = ["median", "low", "high"].map(|name| number(&ratio[name]));
            let bar = Bar {
                label,
                ratio: Ratio { median, low, high },
                target: claim["target"].as_f64(),
                note: text(claim, "verdict").to_owned(),
            };
            self.add(&format!("{bench}-{group}"), MORE, claim["pairs"].as_u64(), bar);
        }
    }

    /// Figures with a limit, as parts of it. Of a count for each operation, which every workload
    /// has, only the largest part.
    fn add_budgets(&mut self, bench: &str) {
        let results = self.results;
        let rows = ["counts", "pauses", "rows"].into_iter().flat_map(|name| list(&results[name]));
        let mut largest: Vec<(&str, Bar)> = Vec::new();
        for row in rows {
            let Some(limit) = row["budget"].as_f64().filter(|limit| *limit > 0.0) else { continue };
            let (name, part) = (text(row, "name"), number(&row["figure"]) / limit);
            let count = name.split_once(": ").filter(|_| name.ends_with("per operation"));
            let (kind, label) = match count {
                Some((workload, kind)) => (kind, format!("{kind}, most in {workload}")),
                None => (name, name.to_owned()),
            };
            let note = if row["met"] == true { "met" } else { "NOT MET" };
            let bar = point(&label, part, None, note);
            match largest.iter_mut().find(|(of, _)| *of == kind) {
                None => largest.push((kind, bar)),
                Some((_, most)) if part > most.ratio.median => *most = bar,
                Some(_) => {}
            }
        }
        for (_, bar) in largest {
            self.add(&format!("{bench}-budgets"), LESS, None, bar);
        }
    }

    /// Instructions of each operation, beside the server that needs the fewest, and of first writes
    /// beside overwrites.
    fn add_counts(&mut self) {
        let rows = instructions(&self.results["rows"]);
        for (server, name, ours) in &rows {
            let Some(target) = Target::ALL.into_iter().find(|one| name.starts_with(one.name()))
            else {
                continue;
            };
            if *server != OURS {
                continue;
            }
            let others = rows.iter().filter(|row| row.0 != OURS && row.1 == *name);
            if let Some((other, _, fewest)) = others.min_by(|a, b| a.2.total_cmp(&b.2)) {
                let aim = |mode| AIMS.into_iter().find(|(of, _)| *of == mode).map(|(_, aim)| aim);
                let (group, aim) = match target {
                    Target::Nbd => ("counts-nbd", None),
                    Target::Ublk(mode) => ("counts-ublk", aim(mode)),
                };
                let bar = part(&format!("{name}: {other}"), *ours, *fewest, aim);
                self.add(group, LESS, None, bar);
            }
            let overwrite = name.replace("first write", "write");
            let mut of_ours = rows.iter().filter(|row| row.0 == OURS && row.1 != *name);
            if let Some((_, _, overwrite)) = of_ours.find(|row| row.1 == overwrite) {
                let aim = Some(AIM_OF_FIRST_WRITE).filter(|(row, _)| row == name);
                let bar = part(name, *ours, *overwrite, aim.map(|(_, aim)| aim));
                self.add("counts-first-writes", LESS, None, bar);
            }
        }
    }

    /// Operations per second on a pool beside those on the disk.
    fn add_device(&mut self) {
        for workload in list(&self.results["workloads"]) {
            let [raw, ours] = ["raw", OURS].map(|side| number(&workload[side]["iops"]));
            let note = format!("{ours:.0} of {raw:.0} IOPS");
            let bar = point(text(workload, "title"), ours / raw, None, &note);
            self.add("device", MORE, None, bar);
        }
    }
}

/// A ratio without an interval.
fn point(label: &str, ratio: f64, target: Option<f64>, note: &str) -> Bar {
    let ratio = Ratio { median: ratio, low: ratio, high: ratio };
    Bar { label: label.to_owned(), ratio, target, note: note.to_owned() }
}

/// Instructions of a row, as a part of those of something else.
fn part(row: &str, ours: f64, of: f64, aim: Option<f64>) -> Bar {
    let note = aim.map_or("", |aim| if ours / of <= aim { "met" } else { "NOT MET" });
    point(&row.replacen("k, ", " KiB, depth ", 1), ours / of, aim, note)
}

/// Server, row and instructions, of a run with others or of the baseline, which has ours alone.
fn instructions(rows: &Value) -> Vec<(&str, &str, f64)> {
    let of = |row: &Value| number(&row["instructions"]);
    match rows.as_object() {
        Some(rows) => rows.iter().map(|(name, row)| (OURS, name.as_str(), of(row))).collect(),
        None => {
            let rows = list(rows).iter();
            rows.map(|row| (text(row, "server"), text(row, "name"), of(row))).collect()
        }
    }
}

/// The pairs and the machine of a run, as far as they are known.
fn run(results: &Value, pairs: Option<u64>) -> String {
    let machine = &results["machine"];
    let known = |value: &Value, after: &str| {
        value.as_str().filter(|text| *text != "unknown").map(|text| format!("{text}{after}"))
    };
    let pairs = pairs.map(|pairs| match results["seconds"].as_f64() {
        Some(seconds) => format!("{pairs} pairs of {seconds} s"),
        None => format!("{pairs} pairs"),
    });
    let kernel = known(&machine["kernel"], "").or_else(|| known(&results["kernel"], ""));
    let disk = text(&results["disk"], "model");
    let facts = [
        pairs,
        Some(disk.to_owned()).filter(|disk| !disk.is_empty()),
        known(&results["front_end"], ""),
        known(&machine["cpu"], ""),
        known(&machine["cores"], " processors"),
        kernel.map(|kernel| format!("kernel {kernel}")),
    ];
    facts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::chart::tests::assert_well_formed;
    use crate::counts::WORKLOADS as COUNTED;
    use crate::counts::peers::Peer;
    use crate::nbd::claims::STAGES;
    use crate::nbd::print::{Claim, claims_json};
    use crate::report::{Budget, Row};
    use crate::ublk::{counts, first_touch, mapped, print};

    const RATIO: Ratio = Ratio { median: 1.1, low: 0.9, high: 1.3 };

    /// Charts of results, each well-formed, small and with a title of its own.
    fn drawn(results: &Value) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for chart in charts(results).unwrap() {
            let svg = chart.svg();
            assert_well_formed(&svg);
            assert!(svg.len() < 20 << 10, "{}: {} bytes", chart.name, svg.len());
            assert!(!svg.contains("not measured"), "{svg}");
            assert!(
                GROUPS.iter().any(|(name, title)| *name == chart.name && *title == chart.title)
            );
            names.insert(chart.name);
        }
        names
    }

    fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
        names.into_iter().map(str::to_owned).collect()
    }

    fn claim(workload: String, claim: &str) -> Claim {
        Claim { workload, claim: claim.to_owned(), ratio: RATIO, target: 1.0, pairs: 9 }
    }

    fn limited(name: String) -> Value {
        Row::new(name, 0.5, "", Budget::AtMost(1.0)).to_json()
    }

    /// All results of `bench nbd` and `bench ublk` have these.
    fn results(claims: &[Claim], counts: &[Value]) -> Value {
        let machine = json!({ "cpu": "A & B", "cores": "2", "kernel": "7.2", "fio": "unknown" });
        json!({
            "machine": machine, "seconds": 0.7, "pairs": 9,
            "claims": claims_json(claims), "counts": counts,
        })
    }

    #[test]
    fn each_stage_of_nbd_has_a_chart() {
        const KINDS: [&str; 2] = ["system calls", "heap allocations"];
        let workloads =
            || STAGES.iter().flat_map(|stage| stage.workloads.iter().map(move |one| (stage, one)));
        let label = "CPU/op, it/ours; the best of its kind: qemu-storage-daemon, O_DIRECT";
        let claims = workloads().flat_map(|(stage, workload)| {
            workload.targets.iter().map(move |_| claim(workload.name(stage), label))
        });
        let mut claims: Vec<Claim> = claims.collect();
        claims.push(claim("first-touch".to_owned(), "IOPS, first touch/overwrite"));
        let counts = workloads().filter(|(_, workload)| workload.connections == 1);
        let counts = counts.flat_map(|(stage, workload)| {
            let name = workload.name(stage);
            KINDS.map(move |kind| limited(format!("{name}: {kind} per operation")))
        });
        let mut results = results(&claims, &counts.collect::<Vec<_>>());
        results["workloads"] = json!([]);
        let stages = STAGES.iter().map(|stage| format!("nbd-{}", stage.name));
        let expected = stages.chain(["nbd-first-touch", "nbd-budgets"].map(str::to_owned));
        assert_eq!(drawn(&results), expected.collect());
        let first = &charts(&results).unwrap()[0];
        assert_eq!(first.notes[1], "9 pairs of 0.7 s, A & B, 2 processors, kernel 7.2");
        assert_eq!(first.bars[0].note, "not resolved");
        let budgets = charts(&results).unwrap().pop().unwrap();
        let labels = budgets.bars.iter().map(|bar| bar.label.as_str());
        let count = "per operation, most in tmpfs/randread-1";
        assert_eq!(labels.collect::<Vec<_>>(), KINDS.map(|kind| format!("{kind} {count}")));
    }

    #[test]
    fn each_part_of_ublk_has_a_chart() {
        let found = |mode| mapped::Finding { mode, iops: RATIO, cpu: RATIO, control: RATIO };
        let findings = Mode::ALL.map(found).to_vec();
        let outcome = mapped::Outcome { lines: Vec::new(), findings };
        let workloads = mapped::WORKLOADS.iter();
        let mut claims: Vec<Claim> =
            workloads.flat_map(|one| print::mapped_claims(one, &outcome, 18)).collect();
        let mut results = results(&claims, &[]);
        results["mapped"] = json!([]);
        assert_eq!(drawn(&results), names(["ublk-pmem-mapped"]));

        let enters = counts::JOBS.map(|job| (job.to_owned(), RATIO)).to_vec();
        claims.extend(print::enters_claims(&counts::Outcome { rows: Vec::new(), enters }, 9));
        for (chunk, depth) in first_touch::shapes() {
            let claimed = ["blockd, overwrite", "dm-thin, 256 KiB, zeroing"].map(|beside| {
                let beside = beside.to_owned();
                first_touch::Claimed { beside, ratio: RATIO, target: Some(2.0) }
            });
            let (control, samples) = (None, Vec::new());
            let claims_of_it = claimed.to_vec();
            let outcome = first_touch::Outcome {
                chunk,
                depth,
                operations: 1,
                control,
                claims: claims_of_it,
                samples,
            };
            claims.extend(print::first_touch_claims(&outcome, 9));
        }
        results["engine"] = json!("libaio");
        results["claims"] = claims_json(&claims);
        results["pauses"] = json!([limited("killed and started".to_owned())]);
        let expected = ["ublk-mapped", "ublk-first-touch", "ublk-counts", "ublk-budgets"];
        assert_eq!(drawn(&results), names(expected));
    }

    #[test]
    fn instructions_stand_beside_the_server_that_needs_the_fewest() {
        let mut rows = Vec::new();
        let mut row = |server: &str, name: String, instructions: f64| {
            rows.push(json!({ "server": server, "name": name, "instructions": instructions }));
        };
        for target in Target::ALL {
            for workload in COUNTED {
                row(OURS, format!("{} {}", target.name(), workload.name), 120.0);
            }
            for (peer, more) in Peer::ALL.into_iter().zip(0_u32..) {
                if peer.target() == target {
                    let name = format!("{} read 4k, 1", target.name());
                    row(peer.name(), name, 100.0 + f64::from(more));
                }
            }
        }
        let results = json!({ "rows": rows, "before": null });
        let expected = ["counts-nbd", "counts-ublk", "counts-first-writes"];
        assert_eq!(drawn(&results), names(expected));
        let [nbd, first, ublk] = &charts(&results).unwrap()[..] else { panic!("three charts") };
        let [bar] = &nbd.bars[..] else { panic!("one bar for each row: {nbd:?}") };
        assert_eq!(bar.label, "nbd read 4 KiB, depth 1: nbdkit file");
        assert_eq!((bar.ratio.median, bar.target, bar.note.as_str()), (1.2, None, ""));
        assert_eq!((ublk.bars[0].target, ublk.bars[0].note.as_str()), (Some(1.1), "NOT MET"));
        assert_eq!(first.bars.len(), 6);
    }

    #[test]
    fn budgets_and_a_disk_have_a_chart() {
        let rows =
            [limited("a".to_owned()), Row::new("b", 0.0, "", Budget::Exactly(0.0)).to_json()];
        let results = json!({ "machine": {}, "rows": rows });
        assert_eq!(drawn(&results), names(["mapper-budgets"]));
        // Nothing is a part of zero.
        assert_eq!(charts(&results).unwrap()[0].bars.len(), 1);

        let workload = json!({ "title": "t", "raw": { "iops": 1000 }, "blockd": { "iops": 500 } });
        let disk = json!({ "model": "A" });
        let results = json!({ "front_end": "ublk", "disk": disk, "workloads": [workload] });
        assert_eq!(drawn(&results), names(["device"]));
        let chart = &charts(&results).unwrap()[0];
        assert_eq!(chart.notes[1], "A, ublk");
        assert_eq!(chart.bars[0].note, "500 of 1000 IOPS");
    }

    #[test]
    fn results_without_claims_are_refused() {
        for results in [json!({}), json!({ "engine": [] }), json!({ "rows": [] })] {
            let error = charts(&results).unwrap_err().to_string();
            assert!(error.starts_with("cannot draw charts: "), "{error}");
        }
    }

    /// The one chart whose results are in the repository.
    #[test]
    fn the_chart_of_the_baseline_is_up_to_date() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let baseline = std::fs::read_to_string(root.join("bench/baseline/0.1.json")).unwrap();
        let baseline: Value = serde_json::from_str(&baseline).unwrap();
        let [chart] = &charts(&baseline).unwrap()[..] else { panic!("one chart") };
        let path = root.join("docs/charts").join(format!("{}.svg", chart.name));
        let command = "cargo ci bench charts bench/baseline/0.1.json --svg docs/charts";
        let present = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(present, chart.svg(), "out of date: {command}");
    }
}
