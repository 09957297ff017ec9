use super::*;

const KINDS: [StateKind; 2] = [StateKind::Signed, StateKind::NonNegative];

fn round_trip(values: &[f32], kind: StateKind, noise: u32) -> Vec<f32> {
    let (mut codes, mut scales) = (
        vec![0; values.len()],
        vec![bf16::ZERO; scales_for(values.len())],
    );
    encode_slice(values, &mut codes, &mut scales, false, kind, |_| noise);
    let mut out = vec![f32::NAN; values.len()];
    decode_slice(&codes, &scales, kind, &mut out);
    out
}

#[test]
fn the_polynomial_is_as_close_as_its_doc_says() {
    for i in 0..=1 << 20 {
        let u = i as f32 / (1 << 20) as f32;
        let exact = 1.0 / (1.0 + u as f64);
        assert!((reciprocal(u) as f64 / exact - 1.0).abs() < 3.9e-4, "{u}");
    }
    assert_eq!(reciprocal(0.0), 1.0);
}

/// acceptance.md, checkpoint 63: what is decoded encodes to the same code, for every code, on a
/// range of scales.
#[test]
fn every_code_comes_back_from_its_value() {
    for kind in KINDS {
        for scale in [2f32.powi(-60), 1e-12, 3.7e-4, 1.0, 250.0, 1e15] {
            let scale = bf16::from_f32(scale);
            for code in 0..=255u8 {
                let impossible = match kind {
                    StateKind::Signed => code == 128,
                    StateKind::NonNegative => code == 0,
                };
                let value = decode(code, unit(scale, kind), kind);
                let again = encode(encoded(value, kind), inverse(scale, kind), NEAREST, kind);
                assert!(
                    again == code || impossible,
                    "{kind:?} {scale} {code} {again}"
                );
            }
        }
    }
}

/// The bounds of the documentation: a step of the code, whichever way the noise goes.
#[test]
fn the_error_is_within_a_step_of_the_code() {
    for kind in KINDS {
        let values: Vec<f32> = (0..GROUP * 3 + 77)
            .map(|i| {
                let value = (i as f32 * 0.37).sin() * 10f32.powi(i as i32 % 7 - 8);
                match kind {
                    StateKind::Signed => value,
                    StateKind::NonNegative => value * value,
                }
            })
            .collect();
        for noise in [0, NEAREST, 255] {
            let out = round_trip(&values, kind, noise);
            for (i, (&value, &got)) in values.iter().zip(&out).enumerate() {
                let block = (i / GROUP * GROUP..(i / GROUP + 1) * GROUP).skip(i % LANES);
                let block = block.step_by(LANES).filter_map(|i| values.get(i));
                let peak = block.fold(0.0f32, |peak, v| peak.max(encoded(*v, kind).abs()));
                let scale = peak as f64 * (1.0 + 2f64.powi(-7));
                let (from, to) = (encoded(value, kind) as f64, encoded(got, kind) as f64);
                // Slope of the companding at the larger of the two, its reciprocals included.
                let bound = match kind {
                    StateKind::Signed => {
                        let x = (from.abs().max(to.abs()) / scale).min(1.0);
                        scale * ((1.0 + x).powi(2) / 2.0 / 127.0 * 1.02 + 8e-4 * x)
                    }
                    StateKind::NonNegative => scale / 255.0 * 1.001,
                };
                assert!((from - to).abs() <= bound, "{kind:?} {value} {got} {bound}");
                assert!(to.abs() <= scale * 1.001);
            }
        }
    }
}

#[test]
fn the_largest_of_a_block_never_wraps_around() {
    for bits in (0x3f80_0000u32..0x4000_0000).step_by(37) {
        let value = f32::from_bits(bits);
        for value in [value, -value] {
            let got = round_trip(&[value], StateKind::Signed, 255)[0];
            assert!((got / value - 1.0).abs() < 0.03, "{value} {got}");
        }
    }
}

#[test]
fn a_root_that_is_not_zero_stays_so_and_zeros_stay_zero() {
    let mut values = vec![0.0; GROUP];
    assert_eq!(round_trip(&values, StateKind::NonNegative, 0), values);
    assert_eq!(round_trip(&values, StateKind::Signed, 255), values);
    values[0] = 1.0;
    values[16] = 1e-12;
    let out = round_trip(&values, StateKind::NonNegative, 0);
    assert!(out[16] >= 1.5e-5, "{}", out[16]);
    assert_eq!(out[1], 0.0, "another block");
    for tiny in [f32::MIN_POSITIVE, 1e-45] {
        assert!(round_trip(&[tiny], StateKind::NonNegative, 0)[0] >= 0.0);
        assert!(round_trip(&[tiny], StateKind::Signed, 0)[0].is_finite());
    }
}

/// The mean over all noise is the value, within what the polynomial and 256ths leave.
#[test]
fn rounding_is_right_in_the_mean() {
    for kind in KINDS {
        for value in [0.013f32, 0.2, 0.77] {
            let values = [1.0, value].map(|v| if kind == StateKind::Signed { v } else { v * v });
            let mut block = vec![0.0; 17];
            (block[0], block[16]) = (values[0], values[1]);
            let roots = (0..256)
                .map(|noise| encoded(round_trip(&block, kind, noise)[16], kind) as f64 / 256.0);
            let mean: f64 = roots.sum();
            assert!(
                (mean / value as f64 - 1.0).abs() < 4e-3,
                "{kind:?} {value} {mean}"
            );
        }
    }
}
