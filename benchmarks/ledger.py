"""Prices every published run from cards, stacks and sites, and prints how far that is off."""
from __future__ import annotations
import argparse, csv, sys, math
from collections import defaultdict
from pathlib import Path
import numpy as np
from autopar.estimate.step import step_time
from benchmarks.ledger_rows import UnusableError, read_settings, run_of
C=Path("/work/shared/cases")
def main():
    ap=argparse.ArgumentParser(); ap.add_argument("--rows",default=""); ap.add_argument("--terms",action="store_true"); a=ap.parse_args()
    rows=list(csv.DictReader(open(C/"published_runs.csv")))+list(csv.DictReader(open(C/"published_runs_more.csv")))
    n1=381
    settings=read_settings(C/"published_runs_settings.jsonl")
    by=defaultdict(list); why=defaultdict(lambda: defaultdict(int))
    for i,row in enumerate(rows):
        st=settings.get(i+2,{}) if i<n1 else {}
        try: run=run_of(row,st)
        except UnusableError as e:
            why[row["source"][:40]][str(e)]+=1; continue
        t=step_time(run.machine,run.job)
        err=t.total_s/run.measured_s-1
        key=row["source"]
        if key.startswith("NVIDIA Megatron-Bridge"): key="Bridge "+("moe" if row["arch"].startswith("moe") else "dense")+("" if "26.06 NeMo Container, " not in row["source"] else " SFT")
        elif key.startswith("MosaicML"): key="MPT "+row["gpu_type"][:4]+(" fp8" if "fp8" in row["precision"] else "")
        elif key.startswith("SimuMax"): key="SimuMax "+("moe" if row["arch"].startswith("moe") else "cp" if row["cp"]!="1" else "dense")
        elif key.startswith("BigS"): key="BLOOM"
        elif key.startswith("torchtitan"): key="torchtitan"+(" bf16" if row["precision"]=="bfloat16" else " fp8")
        else: key=key[:34]
        by[key].append(err)
        if a.rows and a.rows.lower() in key.lower():
            big=sorted(t.terms_s.items(),key=lambda kv:-kv[1])
            print(f"{i+2:4d} {key[:12]:12s} {row['model'][:18]:18s} {row['gpu_type'][:6]:6s} s{row['seq']:>6s} g{row['num_gpus']:>4s} tp{row['tp']} cp{row['cp']} pp{row['pp']} v{run.job.vpp} ep{row['ep']} mb{run.job.micro_batch} M{run.job.micro_batches} {row['precision'][:8]:8s} {str(row['recompute'])[:5]:5s} {run.measured_s:8.3f} {t.total_s:8.3f} {100*err:+6.1f}  "+(" ".join(f"{k[:6]}{100*v/t.total_s:.0f}" for k,v in big if v>.005*t.total_s) if a.terms else ""))
    for k,v in sorted(by.items()):
        v=np.array(v); 
        print(f"{k:36s} n {len(v):3d} bias {100*np.median(v):+6.1f} med {100*np.median(abs(v)):5.1f} MAPE {100*np.mean(abs(v)):5.1f} p90 {100*np.quantile(abs(v),.9):5.1f}")
    for k,v in why.items(): print(k,dict(v))
main()
