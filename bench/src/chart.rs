//! A plain bar chart, as SVG: for each workload the disk by itself and ours, on a scale of their
//! own, since operations of 4 KiB at depth 1 and at depth 32 have no common one.

use std::fmt::Write as _;

use crate::device::Report;

/// Pixels.
const WIDTH: u32 = 760;
const LEFT: u32 = 270;
const BARS: u32 = 360;
const BAR: u32 = 16;
const ROW: u32 = 56;
const TOP: u32 = 76;

const RAW: &str = "#9aa4ad";
const OURS: &str = "#2f6fb3";

/// The chart of a report.
#[must_use]
pub fn svg(report: &Report) -> String {
    let rows = u32::try_from(report.outcomes.len()).unwrap_or(0);
    let height = TOP + rows * ROW + 12;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let title =
        format!("{} by itself, and blockd on it over {}", report.disk.model, report.front_end);
    label(&mut text, 16, 26, "start", 15, &title);
    for (at, color, name) in [(LEFT, RAW, "raw"), (LEFT + 80, OURS, "blockd")] {
        bar(&mut text, (at, 44), 12, color);
        label(&mut text, at + 18, 56, "start", 13, name);
    }
    let mut top = TOP;
    for outcome in &report.outcomes {
        let (raw, ours) = outcome.iops();
        let most = raw.max(ours);
        label(&mut text, LEFT - 12, top + BAR + 5, "end", 13, outcome.workload.title);
        for (line, (iops, color)) in [(raw, RAW), (ours, OURS)].into_iter().enumerate() {
            let y = top + if line == 0 { 0 } else { BAR + 2 };
            let length = pixels(iops / most);
            bar(&mut text, (LEFT, y), length, color);
            let said = format!("{iops:.0} IOPS");
            label(&mut text, LEFT + length + 6, y + BAR - 4, "start", 12, &said);
        }
        top += ROW;
    }
    text += "</svg>\n";
    text
}

/// How long a bar is that stands for this part of the longest.
fn pixels(part: f64) -> u32 {
    // Without a cast: the few hundred lengths are counted.
    (0..=BARS).take_while(|length| f64::from(*length) <= part * f64::from(BARS)).last().unwrap_or(0)
}

fn bar(text: &mut String, (x, y): (u32, u32), length: u32, color: &str) {
    let _ = writeln!(
        text,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{length}\" height=\"{BAR}\" fill=\"{color}\"/>"
    );
}

fn label(text: &mut String, x: u32, y: u32, anchor: &str, size: u32, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        text,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Sample;
    use crate::device::disk::Disk;
    use crate::device::{Outcome, WORKLOADS};

    #[test]
    fn bars_are_as_long_as_their_figures() {
        let sample = |iops| {
            vec![Sample { iops, operations: 1.0, latency_us: 1.0, longest_s: 0.0, cpu_us: None }]
        };
        let disk = Disk {
            path: "/dev/sdx".into(),
            name: "sdx".to_owned(),
            bytes: 1 << 30,
            model: "A & B".to_owned(),
            partitions: Vec::new(),
            uses: Vec::new(),
        };
        let outcome = Outcome { workload: WORKLOADS[0], raw: sample(1000.0), ours: sample(500.0) };
        let report = Report { disk, front_end: "ublk", bytes: 1 << 29, outcomes: vec![outcome] };
        let text = svg(&report);
        assert!(text.contains("A &amp; B by itself, and blockd on it over ublk"), "{text}");
        assert!(text.contains("width=\"360\" height=\"16\" fill=\"#9aa4ad\""), "{text}");
        assert!(text.contains("width=\"180\" height=\"16\" fill=\"#2f6fb3\""), "{text}");
        assert!(text.contains(">1000 IOPS<") && text.contains(">500 IOPS<"), "{text}");
        assert_eq!(pixels(f64::NAN), 0);
    }
}
